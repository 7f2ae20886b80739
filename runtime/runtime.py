"""What an application holds: one endpoint, the limits, and the slots that all its rollouts share."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal

import anyio
import msgspec

from turngate.envs.base import Task
from turngate.runtime.agent import Agent, AgentOrEnv, check_agent_run, run_agent
from turngate.runtime.context import Context, full
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.errors import ConfigError
from turngate.runtime.evaluation import Evaluation, summarise_episodes
from turngate.runtime.events import EvaluationFinished, Events
from turngate.runtime.guidance import Guidance
from turngate.runtime.injection import Injection
from turngate.runtime.limits import Limits
from turngate.runtime.loopback import Loopback
from turngate.runtime.restarts import RestartPoint
from turngate.runtime.rollout import run_rollout
from turngate.runtime.scorers import Scorer, ScorerSet
from turngate.runtime.seeds import derive_seed
from turngate.runtime.session import Session
from turngate.runtime.session_table import SessionTable
from turngate.runtime.slots import Slots
from turngate.runtime.strays import played_apart
from turngate.runtime.types import Sampling, Trajectory
from turngate.runtime.unwrap import single_errors

__all__ = ["Runtime"]


class Runtime:
    """Runs agents against one endpoint. Plain object: make one, pass it around, no registry and no globals."""

    def __init__(
        self,
        endpoint: ChatEndpoint,
        *,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        context: Context | None = None,
        max_concurrent: int = 128,
        events: Events | None = None,
        scorers: ScorerSet | Sequence[Scorer] = (),
        guidance: Guidance | None = None,
    ) -> None:
        """Hold the parts; nothing runs until asked.

        Args: max_concurrent: live rollouts at most, over training and evaluation together. scorers: judge every
            episode that did not fail, while it still holds its slot; evaluations are not judged. guidance: chooses
            every action, in training and evaluation, unless those are told otherwise.
        """
        self.endpoint = endpoint
        self.limits = limits or Limits()
        self.sampling = sampling or Sampling()
        self.context = context or full()
        self.slots = Slots(max_concurrent)
        self.events = events or Events()
        self.guidance = _checked(guidance)
        self.scorers = scorers if isinstance(scorers, ScorerSet) else ScorerSet(scorers)
        self._loopback = Loopback(self._open_gateway, request_timeout_s=self.limits.request_timeout_s)
        self.sessions = SessionTable(
            endpoint,
            limits=self.limits,
            sampling=self.sampling,
            events=self.events,
            door=self._loopback,
            guidance=guidance,
        )

    def __repr__(self) -> str:
        return f"<Runtime {self.endpoint!r} {self.slots!r}>"

    async def aclose(self) -> None:
        """Close the gateway behind `session.openai` in the running event loop, if one is open.

        The end of the loop does so too, if its tasks are cancelled, as `asyncio.run` does. Sessions stay open.
        """
        await self._loopback.aclose()

    def session(
        self,
        task: Task | None = None,
        *,
        id: str = "",
        seed: int = 0,
        sampling: Sampling | None = None,
        timeout_s: float | None = None,
        guidance: Guidance | Literal["runtime"] | None = "runtime",
    ) -> Session:
        """Open an episode for an agent of your own, without waiting for a slot; `async with` ends it.

        Args: task: what it is about, for the record. id: of its trajectory. seed: of its requests that bring none.
            sampling: pins how replies are drawn, in place of the runtime's. timeout_s: until its deadline;
            `Limits.rollout_timeout_s` when None. guidance: chooses its replies; `runtime` stands for the runtime's own,
            None for none.
        """
        return self.sessions.create(
            task,
            id=id,
            seed=seed,
            limits=self.limits,
            sampling=sampling or self.sampling,
            timeout_s=timeout_s,
            guidance=self.guidance if guidance == "runtime" else _checked(guidance),
        )

    async def rollout(
        self,
        env: AgentOrEnv,
        task: Task,
        *,
        seed: int = 0,
        env_seed: int | None = None,
        group_id: str = "",
        member: int = 0,
        trajectory_id: str = "",
        sampling: Sampling | None = None,
        keep_snapshots: bool = False,
        last_contexts: bool = False,
        start: RestartPoint | None = None,
        injection: Injection | None = None,
        guidance: Guidance | Literal["runtime"] | None = "runtime",
        score: bool = True,
    ) -> Trajectory:
        """Run one episode now, without waiting for a slot; failures of env or endpoint are on the trajectory.

        Args: as of `run_rollout`; an `Agent` has no snapshots to keep or to start from, and takes no injection.
            guidance: `runtime` stands for the runtime's own, None for none.
            score: let the scorers judge the episode, if it did not fail.
        """
        guidance = self.guidance if guidance == "runtime" else _checked(guidance)
        check_agent_run(env, restarts=start, injection=injection, keep_snapshots=keep_snapshots)
        if isinstance(env, Agent):
            trajectory = await run_agent(
                env,
                task,
                self.sessions,
                limits=self.limits,
                sampling=sampling or self.sampling,
                seed=seed,
                env_seed=env_seed,
                group_id=group_id,
                member=member,
                trajectory_id=trajectory_id,
                last_contexts=last_contexts,
                guidance=guidance,
            )
        else:
            trajectory = await run_rollout(
                env,
                task,
                self.endpoint,
                limits=self.limits,
                sampling=sampling or self.sampling,
                context=self.context,
                seed=seed,
                env_seed=env_seed,
                group_id=group_id,
                member=member,
                trajectory_id=trajectory_id or f"{task.id}.{seed}",
                events=self.events,
                keep_snapshots=keep_snapshots,
                last_contexts=last_contexts,
                start=start,
                injection=injection,
                guidance=guidance,
            )
        if score and not trajectory.end.is_failure:
            trajectory = await self.scorers.score(trajectory, events=self.events)
        return trajectory

    async def evaluate(
        self,
        env: AgentOrEnv,
        tasks: Sequence[Task],
        *,
        sampling: Sampling | None = None,
        guidance: Guidance | Literal["runtime"] | None = "runtime",
        seed: int = 0,
        name: str = "evaluation",
    ) -> Evaluation:
        """Run every task once, from its start, and summarise; rollouts take turns in the runtime's slots.

        Cancelling it cancels the rollouts and leaves no slot taken.
        """
        trajectories: list[Trajectory | None] = [None] * len(tasks)
        began_s = time.monotonic()

        repeats: Counter[str] = Counter()  # a task played several times has luck of its own each time

        async def run_one(index: int, task: Task, seed: int) -> None:
            async with self.slots.hold(priority=index):
                name = f"eval.{index}"
                rollout = self.rollout(
                    env, task, seed=seed, trajectory_id=name, sampling=sampling, guidance=guidance, score=False
                )
                trajectories[index] = await played_apart(rollout, trajectory_id=name, task=task, seed=seed)

        with single_errors():
            async with anyio.create_task_group() as tg:
                for index, task in enumerate(tasks):
                    tg.start_soon(run_one, index, task, derive_seed(seed, "evaluation", task.id, repeats[task.id]))
                    repeats[task.id] += 1
                    await asyncio.sleep(0)  # let each send its request before the next: no burst on the event loop
        evaluation = summarise_episodes([t for t in trajectories if t is not None])
        if (hear := self.events.evaluation_finished) is not None:
            hear(
                EvaluationFinished(
                    name=name,
                    policy_version=self.endpoint.policy_version,
                    episodes=evaluation.scored,
                    successes=evaluation.successes,
                    reward_mean=evaluation.mean_reward,
                    seconds=time.monotonic() - began_s,
                )
            )
        return evaluation

    def _open_gateway(self, listener: socket.socket) -> AbstractAsyncContextManager[object]:
        from turngate.runtime.gateway import Gateway, GatewayConfig  # late: it imports this module

        config = GatewayConfig(request_timeout_s=self.limits.request_timeout_s)
        # The agents are ours: as many replies at once as without guidance, each drawn several times.
        draws = config.max_guidance_draws
        config = msgspec.structs.replace(
            config, max_open=config.max_open * draws, max_open_per_session=config.max_open_per_session * draws
        )
        return Gateway(self.sessions, config, listener=listener)


def _checked(guidance: object) -> Guidance | None:
    if guidance is None or isinstance(guidance, Guidance):
        return guidance
    raise ConfigError(
        f"guidance must be Guidance(...) or None: got {guidance!r:.80}; TokenGuidance goes into Sampling(guidance=...)"
    )
