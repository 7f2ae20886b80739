"""One episode as one coroutine: context, completion, record, step, until something ends it."""

import asyncio
import inspect
from collections.abc import Callable, Sequence

import msgspec

from turngate.envs.base import Action, End, EnvFactory, Snapshot, Step, Task
from turngate.runtime.acting import Acting, Sampled
from turngate.runtime.answers import answer_messages, answer_text, check_messages, checked_rewards, said_last, writable
from turngate.runtime.clock import Clock
from turngate.runtime.context import Context, FullHistory, History, full
from turngate.runtime.conversation import Shown, token_mode_of
from turngate.runtime.deadline import DeadlineExceeded
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.episode_env import TIMEOUTS, EpisodeEnv, Waits
from turngate.runtime.errors import ContextOverflow, EndpointError, EnvError, ToolError
from turngate.runtime.events import Events, RolloutFinished, RolloutStarted, TurnFinished
from turngate.runtime.foreign import ForeignCalls
from turngate.runtime.guidance import Guidance
from turngate.runtime.injection import Injection
from turngate.runtime.limits import Limits
from turngate.runtime.recorder import Recorder
from turngate.runtime.restarts import RestartPoint
from turngate.runtime.seeds import derive_seed
from turngate.runtime.types import Completion, Message, Sampling, Trajectory, Turn

__all__ = ["run_rollout"]

_UNHEARD = Events()


async def run_rollout(
    env_factory: EnvFactory,
    task: Task,
    endpoint: ChatEndpoint,
    *,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    context: Context | None = None,
    seed: int = 0,
    env_seed: int | None = None,
    group_id: str = "",
    member: int = 0,
    trajectory_id: str = "",
    events: Events | None = None,
    clock: Clock | None = None,
    keep_snapshots: bool = False,
    last_contexts: bool = False,
    start: RestartPoint | None = None,
    injection: Injection | None = None,
    guidance: Guidance | None = None,
    on_cancelled: Callable[[Trajectory], None] | None = None,
) -> Trajectory:
    """Play one episode of `task` and return it, however it ended.

    What goes wrong in the environment or at the endpoint is on the trajectory, as its end and `error`; only bugs of
    ours and wrong configuration raise. Cancelled: the environment is closed, the partial record is finished with
    `End.cancelled` and given to `on_cancelled` and the events, and CancelledError goes on.

    Args: seed: root of this rollout's streams, the environment's and one per turn for the sampler.
        env_seed: the environment's luck, to share it between members of a group; derived from `seed` when None.
        keep_snapshots: store the environment's state before each action; the environment must be a SnapshotEnv.
        last_contexts: when the episode is truncated, ask the server for one token more, which is thrown away, to learn
            what the model would have been shown next: value estimates bootstrap from there.
        start: state of an earlier episode of `task` to start from, instead of its beginning; its turns count towards
            `max_turns`, and luck is fresh. The environment must be a SnapshotEnv.
        injection: lets something else act in the model's place now and then.
        guidance: chooses each action among several draws by their values.
    """
    episode = _Episode(
        task=task,
        endpoint=endpoint,
        limits=limits,
        sampling=sampling,
        context=context or full(),
        seed=seed,
        env_seed=derive_seed(seed, "env") if env_seed is None else env_seed,
        group_id=group_id,
        member=member,
        trajectory_id=trajectory_id or f"{task.id}.{seed}",
        events=events or _UNHEARD,
        # The loop's own clock by default, so that timings agree with deadlines, in virtual time too.
        now=clock.now if clock is not None else asyncio.get_running_loop().time,
        keep_snapshots=keep_snapshots,
        last_contexts=last_contexts,
        start=start,
        injection=injection,
        guidance=guidance,
    )
    try:
        try:
            end, error = await episode.play(env_factory)
        finally:
            await episode.aclose()
    except asyncio.CancelledError:
        trajectory = episode.finish(End.cancelled, "cancelled from outside")
        if on_cancelled is not None:
            on_cancelled(trajectory)
        raise
    return episode.finish(end, error)


class _Episode:
    """The state of one episode and the steps of its loop."""

    # State, changed as the episode goes on.
    _env: EpisodeEnv  # made by play(), closed by aclose()
    _history: History | None  # None until the environment has been reset
    _first_observation: str  # what the environment said before the first turn
    _turns: list[Turn]  # finished turns
    _pending: Sampled | None  # an action recorded and not yet answered by the environment
    _end: End | None  # how the episode ended, once that is settled
    _has_looked: bool  # whether the server was asked for the context after the last turn

    def __init__(
        self,
        *,
        task: Task,
        endpoint: ChatEndpoint,
        limits: Limits,
        sampling: Sampling,
        context: Context,
        seed: int,
        env_seed: int,
        group_id: str,
        member: int,
        trajectory_id: str,
        events: Events,
        now: Callable[[], float],
        keep_snapshots: bool,
        last_contexts: bool,
        start: RestartPoint | None,
        injection: Injection | None,
        guidance: Guidance | None,
    ) -> None:
        self._task, self._endpoint, self._limits, self._sampling = task, endpoint, limits, sampling
        self._context, self._seed, self._env_seed = context, seed, env_seed
        self._group_id, self._member, self._id = group_id, member, trajectory_id
        self._events, self._now, self._keep_snapshots = events, now, keep_snapshots
        self._last_contexts, self._start = last_contexts, start
        self._history = self._pending = self._end = None
        self._turns = []
        self._first_observation = ""
        self._has_looked = False
        self._recorder, self._last_shown = Recorder(), Shown()
        self._waits = Waits(limits)
        self._deadline = self._waits.deadline
        self._calls = ForeignCalls(f"trajectory {trajectory_id}", self._deadline, grace_s=limits.close_timeout_s)
        self._env = EpisodeEnv(self._calls, self._waits)
        self._acting = Acting(
            endpoint,
            task,
            self._env,
            self._calls,
            self._waits,
            limits=limits,
            seed=seed,
            injection=injection,
            guidance=guidance,
            now=now,
        )
        self._started_s = now()

    async def play(self, env_factory: EnvFactory) -> tuple[End, str]:
        """Run until something ends the episode; return the end and, for failures and timeouts, what happened."""
        if (tell := self._events.rollout_started) is not None:
            tell(RolloutStarted(self._id, self._group_id, self._member, self._task.id))
        why = ""
        try:
            with self._deadline:
                try:
                    self._end = await self._play(env_factory)
                except ContextOverflow as error:
                    self._end, why = End.context_overflow, self._where(str(error))
                await self._look_ahead(self._end)
                return self._end, why
        except DeadlineExceeded as error:
            if not self._deadline.expired:
                raise  # somebody else's deadline
            if self._end is not None:
                return self._end, why  # it was the look ahead that took too long
            end, limit = TIMEOUTS[error.what]
            seconds = getattr(self._limits, limit)
            return end, self._where(f"{error.what} must finish within {seconds:g} s: it did not (Limits.{limit})")
        except EndpointError as error:
            return End.endpoint_error, self._where(f"{type(error).__name__}: {error}")
        except ToolError as error:
            return End.tool_error, self._where(f"ToolError: {error}")
        except EnvError as error:
            return End.env_error, self._where(str(error))

    async def _play(self, env_factory: EnvFactory) -> End:
        self._waits.begin_rollout()
        history = await self._reset(env_factory)
        while True:
            # 1. Stop where the collector's limits say so.
            turn = len(self._turns)
            if history.turns >= self._limits.max_turns:
                return End.turn_limit
            sampling = self._allowed_sampling()
            if sampling is None and not self._acting.injects(turn):  # what is injected takes none
                return End.token_limit
            self._waits.begin_turn()
            # 2. Decide what the model sees, and sample what it does.
            snapshot = await self._env.snapshot() if self._keep_snapshots else None
            shown, sampled = await self._sample(history, sampling or self._sampling, turn, snapshot)
            if not sampled.is_injected and self._is_too_long(sampled.completion):
                self._keep_last_context(sampled.completion)
                return End.context_overflow
            # 3. Record it before anything else can fail.
            self._record(sampled, turn, snapshot, shown)
            # 4. Let the environment answer.
            end = await self._step(history, sampled)
            if end is not None:
                return end

    async def _reset(self, env_factory: EnvFactory) -> History:
        env, start = self._env, self._start
        await env.make(env_factory, needs_snapshots=self._keep_snapshots or start is not None)
        observation = await env.reset(self._task, self._env_seed)
        self._acting.tools = observation.tools
        if start is not None:
            await env.restore(start.snapshot, derive_seed(self._env_seed, "restore"))
            self._history = History.of(start.messages)
            if start.chat is not None:
                self._acting.recall(start.chat)
            self._first_observation = said_last(start.messages)
            return self._history
        head = [Message("system", observation.system)] if observation.system else []
        # The model must be told something: the task's own words stand in for an empty first observation.
        head += answer_messages(observation) or [Message("user", self._task.prompt)]
        self._history = History(head)
        self._first_observation = said_last(head)
        return self._history

    def _allowed_sampling(self) -> Sampling | None:
        """Return the sampling of the next turn within the token limit; None when there is nothing left."""
        limit = self._limits.max_policy_tokens
        if limit is None:
            return self._sampling
        left = limit - self._policy_tokens
        if left >= self._sampling.max_tokens:
            return self._sampling
        return msgspec.structs.replace(self._sampling, max_tokens=left) if left > 0 else None

    @property
    def _policy_tokens(self) -> int:
        """Generated tokens so far, those before a restart included where it counts them."""
        before = self._start.restarted_from.policy_tokens if self._start is not None else 0
        return before + self._recorder.policy_tokens

    async def _shown(self, history: History) -> Sequence[Message]:
        """Return what the context function shows of the history; nonsense and whatever it raises is a ToolError."""
        if type(self._context) is FullHistory:
            return history.messages

        async def ask() -> Sequence[Message]:
            shown = self._context(history)
            return await shown if inspect.isawaitable(shown) else shown

        self._waits.wait_for("context")
        length = len(history)
        shown = await self._calls.run("the context function", ToolError, ask)
        if len(history) != length:
            raise ToolError(f"the context function must not change the history: it did ({self._context!r})")
        if shown is not history.messages:
            check_messages(shown, repr(self._context))
        return shown

    async def _look_ahead(self, end: End) -> None:
        """Learn what the model would be shown next, if the episode could go on and that is wanted and not yet known."""
        history = self._history
        if not (self._last_contexts and end.is_truncation) or history is None or self._has_looked:
            return
        try:
            shown = await self._shown(history)
            # The server's own tokens, on any server that returns them; a prompt alone cannot be asked for everywhere.
            sampling = msgspec.structs.replace(self._sampling, max_tokens=1)
            sampled = await self._acting.sample(shown, sampling, len(self._turns))
            self._keep_last_context(sampled.completion)
        except (EndpointError, ToolError):
            return  # what was recorded last has to do: the episode itself went well

    def _keep_last_context(self, completion: Completion) -> None:
        self._has_looked = True
        limit = self._limits.max_context_tokens
        if limit is None or len(completion.prompt_token_ids) <= limit:  # learners may be sized for the limit
            self._recorder.add_last_context(completion.prompt_token_ids)

    async def _sample(
        self, history: History, sampling: Sampling, turn: int, saved: Snapshot | None
    ) -> tuple[Sequence[Message], Sampled]:
        """Return what the model is shown, and what was done then, whoever chose it."""
        shown = await self._shown(history)
        spent = self._policy_tokens
        sampled = await self._acting.act(shown, sampling, turn, history.messages, policy_tokens=spent, saved=saved)
        return shown, sampled

    def _is_too_long(self, completion: Completion) -> bool:
        limit = self._limits.max_context_tokens
        return limit is not None and len(completion.prompt_token_ids) + len(completion.token_ids) > limit

    def _record(self, sampled: Sampled, turn: int, snapshot: Snapshot | None, shown: Sequence[Message]) -> None:
        if sampled.is_injected:
            sampled.segment, sampled.start = self._recorder.position()
        else:
            goes_on = self._last_shown.is_extended_by(shown)
            place = self._recorder.add(sampled.completion, turn, goes_on=goes_on)
            sampled.segment, sampled.start, sampled.length = place
            self._last_shown.add(shown, sampled.said, goes_on=goes_on)
        sampled.snapshot = snapshot
        self._pending = sampled

    async def _step(self, history: History, sampled: Sampled) -> End | None:
        completion = sampled.completion
        asked_s = self._now()
        step = await self._env.step(Action(completion.text, completion.tool_calls))
        rewards = checked_rewards(step)
        turn = self._turn(sampled, step, rewards, self._now() - asked_s)
        self._turns.append(turn)
        self._pending = None
        history.append_turn(sampled.said, answer_messages(step.observation))
        if (tell := self._events.turn_finished) is not None:
            tell(TurnFinished(self._id, turn))
        return step.end

    def _turn(self, sampled: Sampled, step: Step | None, rewards: dict[str, float], env_s: float) -> Turn:
        completion = sampled.completion
        return Turn(
            index=len(self._turns),
            segment=sampled.segment,
            start=sampled.start,
            length=sampled.length,
            text=completion.text,
            tool_calls=completion.tool_calls,
            stop_reason=completion.stop_reason,
            observation=answer_text(step.observation) if step is not None else "",
            rewards=rewards,
            valid=bool(step.valid) if step is not None else True,
            injected=sampled.is_injected,
            version_sent=completion.version_sent,
            version_received=completion.version_received,
            guided_tokens=completion.guided_tokens,
            decision=completion.decision,
            model_s=sampled.model_s,
            env_s=env_s,
            snapshot=sampled.snapshot,
            state=step.state if step is not None else None,
        )

    async def aclose(self) -> None:
        """Close the environment, if there is one; see `close_env`."""
        await self._env.aclose(timeout_s=self._limits.close_timeout_s, owner=f"trajectory {self._id}")

    def finish(self, end: End, error: str) -> Trajectory:
        """Return the record as it stands and tell the events."""
        recorder = self._recorder
        messages = list(self._history.messages) if self._history is not None else []
        pending = self._pending
        is_whole = recorder.knows_last_context or (pending is not None and not pending.is_injected)
        if pending is not None:
            # Its tokens are in the segments, so the turn must be among the turns, answered or not.
            messages.append(pending.said)
            self._turns.append(self._turn(pending, None, {}, 0.0))
            self._pending = None
        trajectory = Trajectory(
            id=self._id,
            task=self._task,
            group_id=self._group_id,
            member=self._member,
            seed=self._seed,
            restarted_from=self._start.restarted_from if self._start is not None else None,
            first_observation=self._first_observation,
            turns=tuple(self._turns),
            segments=recorder.segments(),
            end=end,
            error=error,
            messages=tuple(messages),
            last_context=(last_context := recorder.last_context() if end.is_truncation else b""),
            last_context_is_whole=is_whole and last_context != b"",
            token_mode=token_mode_of(self._endpoint),
            drifts=recorder.drifts,
            trainable=not recorder.untrainable_because,
            untrainable_because=recorder.untrainable_because,
            started_s=self._started_s,
            ended_s=self._now(),
        )
        if (tell := self._events.rollout_finished) is not None:
            tell(RolloutFinished(trajectory))
        return trajectory

    def _where(self, what: str) -> str:
        return writable(f"{what} (trajectory {self._id}, turn {len(self._turns)})")
