"""PPO for real: rollouts of the engine through every context, cut short or not, and the numbers read off them."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from turngate.envs.base import Action, End, Observation, Step, Task, ToolSpec
from turngate.envs.shopping import ShoppingEnv, demonstrations, train_tasks
from turngate.learners import CloningConfig, clone
from turngate.learners.batch import TokenBatch, lay_out
from turngate.learners.critic import Critic, CriticConfig, ValueTargets, after_actions, with_value_head
from turngate.learners.episode_credit import CreditLevel, GAEConfig
from turngate.learners.policy_learner import Scored
from turngate.learners.ppo import PPO
from turngate.learners.replay import ReplayConfig, as_batch
from turngate.learners.reward_scheme import RewardScheme
from turngate.learners.turns import action_turns, recorded_rewards, turn_tokens
from turngate.runtime import Context, Limits, Message, Runtime, full, last_turns, summarise, token_budget, train
from turngate.runtime.engine import Engine
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.types import Batch, Completion, Sampling, Trajectory, UpdateReport
from turngate.runtime.worker import LearnerWorker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has just learned to write actions."""
    folder = tmp_path_factory.mktemp("policy") / "model"
    return clone(demonstrations(128, seed=1), folder, config=CloningConfig(steps=40, adamw_lr=0.02))


def _shorten(summary: str, messages: Sequence[Message]) -> str:
    return f"{summary} {len(messages)}".strip()


CONTEXTS = {
    "full": full(),
    "last_turns": last_turns(1),
    "token_budget": token_budget(60, lambda message: len(message.content.split()) + 8),
    "summarise": summarise(_shorten, after_turns=2),
}


# --- training


@pytest.mark.parametrize(
    ("context", "level", "place", "turns"),
    [
        ("full", "bilevel", "separate", 2),
        ("last_turns", "turn", "trunk", 2),
        ("token_budget", "bilevel", "trunk", 3),
        ("summarise", "turn", "separate", 4),
    ],
)
async def test_cut_episodes_train_through_every_context_and_logprobs_stay_those_of_the_sampler(
    model: Path, tmp_path: Path, context: str, level: CreditLevel, place: Any, turns: int
) -> None:
    learner = PPO(
        model, parity="error", parity_tolerance=1e-4, credit=GAEConfig(level=level),
        # A policy this raw earns nothing, and from a blank critic nothing is no news: turns cost something here.
        critic=CriticConfig(place=place, kind="scalar"), rewards=RewardScheme(turn_cost=0.1, invalid_penalty=0.2),
    )  # fmt: skip
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=turns), context=CONTEXTS[context])
        report = await train(
            runtime, ShoppingEnv, train_tasks(64, seed=1), learner=learner, updates=3, run_dir=tmp_path, group_size=2,
            groups_per_batch=6, max_staleness=0, worker="thread",
        )  # fmt: skip
    for row in report.history:  # synchronous: every token is of the learner's own version
        assert row["parity_tokens"] == row["policy_tokens"] > 0
        assert row["parity_max_abs"] < 1e-4
        assert row["excluded_no_last_context"] == 0
        assert row["bootstrap_share"] > 0
        assert row["grad_norm"] > 0


# --- identities on what was recorded


async def _play(model: Path, context: Context, *, turns: int, n: int = 6) -> list[Trajectory]:
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=turns), context=context)
        rollouts = [
            runtime.rollout(ShoppingEnv, task, seed=seed, last_contexts=True, trajectory_id=f"t{seed}")
            for seed, task in enumerate(train_tasks(n, seed=2))
        ]
        return list(await asyncio.gather(*rollouts))


def _outspoken(model: Path, config: GAEConfig) -> PPO:
    """Return a learner whose critic says something different of every state."""
    critic = CriticConfig(kind="scalar", action_values=True)
    ppo = PPO(model, credit=config, critic=critic, whiten=False, off_policy="decoupled")
    ppo.load(None)
    assert ppo._critic is not None
    head = ppo._critic.model.value_head
    assert head is not None
    with torch.no_grad():
        head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    return ppo


class _Lessons:
    """Keeps what a critic is taught, and lets it learn nothing."""

    def __init__(self, critic: Critic, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[TokenBatch, ValueTargets]] = []
        monkeypatch.setattr(critic, "learn", self.keep)

    def keep(self, tokens: TokenBatch, targets: ValueTargets, *, epochs: int | None = None) -> dict[str, float]:
        self.found.append((tokens, targets))
        return {}


def _credited(
    model: Path, config: GAEConfig, trajectories: Sequence[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> tuple[PPO, TokenBatch, Tensor, list[tuple[TokenBatch, ValueTargets]]]:
    """Return the learner, the tokens, their advantages, and what the critic was taught: of tokens, then of actions."""
    ppo = _outspoken(model, config)
    assert ppo._critic is not None
    lessons = _Lessons(ppo._critic, monkeypatch)
    batch = as_batch(trajectories, policy_version=0)
    keep, _ = ppo._select(batch)
    assert all(all(k) for k in keep)
    tokens = lay_out(batch, keep, vocabulary_size=ppo._critic.model.config.vocab_size)
    zeros_N = torch.zeros(len(tokens.mask_N))
    credit = ppo._credit(Scored(batch, keep, tokens, zeros_N, zeros_N, None))
    return ppo, tokens, credit.advantages_N, lessons.found


@pytest.mark.parametrize(("context", "turns"), [("full", 4), ("last_turns", 4), ("token_budget", 2)])
async def test_i1_token_q_is_turn_q_at_the_last_token_of_every_recorded_action(
    model: Path, context: str, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectories = await _play(model, CONTEXTS[context], turns=turns)
    assert any(t.end is End.turn_limit and t.last_context_is_whole for t in trajectories)
    assert any(len(t.segments) > 1 for t in trajectories) or context == "full"
    config = GAEConfig(level="bilevel", gamma=0.97, lam=0.9, gamma_token=0.999, lam_token=0.8)
    ppo, tokens, advantages_N, (of_tokens, of_actions) = _credited(model, config, trajectories, monkeypatch)
    assert ppo._critic is not None
    where = [at for turns_ in turn_tokens(tokens).values() for at in turns_.values()]
    assert len(where) == sum(len(t.turns) for t in trajectories)
    targets_N, values_N = of_tokens[1].targets_N, of_tokens[1].old_N
    first = torch.stack([at[0] for at in where])
    last = torch.stack([at[-1] for at in where])
    # Turn-Q, from a recursion over turns alone that reads V at the start of each and at the last context.
    expected: list[Tensor] = []
    bootstraps = ppo._reader.bootstraps(trajectories)
    for number, (trajectory, bootstrap) in enumerate(zip(trajectories, bootstraps, strict=True)):
        at = torch.stack([at[0] for at in turn_tokens(tokens)[number].values()])
        rewards_T = action_turns(trajectory, recorded_rewards(trajectory)).rewards_T
        expected.append(_turn_q(rewards_T, values_N[at], 0.0 if bootstrap is None else bootstrap, 0.97, 0.9))
    turn_q = torch.cat(expected)
    assert torch.allclose(targets_N[last], turn_q, atol=1e-5)
    assert torch.allclose(advantages_N[last] + values_N[last], turn_q, atol=1e-5)
    assert float((targets_N[first] - turn_q).abs().max()) > 1e-3  # it holds at the last token, not anywhere
    # Q read once the action is complete is a number of its own, with the same target.
    ends, lesson = of_actions
    assert torch.equal(lesson.mask_N, after_actions(tokens, max_length=ppo._critic.model.config.max_context).mask_N)
    assert torch.allclose(lesson.targets_N[lesson.mask_N], turn_q, atol=1e-5)
    assert float((lesson.old_N[lesson.mask_N] - values_N[last]).abs().max()) > 1e-3
    assert ends.turn_ids_N[ends.mask_N].tolist() == tokens.turn_ids_N[last].tolist()


def _turn_q(rewards_T: Tensor, values_T: Tensor, following: float, gamma: float, lam: float) -> Tensor:
    """Return A_t + V_t, the plain way."""
    values = [*values_T.tolist(), following]
    advantage, made = 0.0, list[float]()
    for t in reversed(range(len(rewards_T))):
        advantage = float(rewards_T[t]) + gamma * values[t + 1] - values[t] + gamma * lam * advantage
        made.insert(0, advantage + values[t])
    return torch.tensor(made)


async def test_i2_i3_i4_hold_on_recorded_actions(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trajectories = await _play(model, CONTEXTS["last_turns"], turns=4)

    def advantages(**options: Any) -> tuple[TokenBatch, Tensor]:
        found = _credited(model, GAEConfig(**options), trajectories, monkeypatch)
        return found[1], found[2]

    discounts = {"gamma": 0.97, "lam": 0.9}
    tokens, turn_N = advantages(level="turn", **discounts)
    where = [at for turns in turn_tokens(tokens).values() for at in turns.values()]
    of_turns = torch.stack([turn_N[at[0]] for at in where])
    _, short_N = advantages(level="bilevel", lam_token=0.0, **discounts)
    assert torch.allclose(torch.stack([short_N[at].sum() for at in where]), of_turns, atol=1e-5)  # I2
    _, long_N = advantages(level="bilevel", **discounts)
    assert torch.allclose(torch.stack([long_N[at[0]] for at in where]), of_turns, atol=1e-5)  # I3
    _, both_N = advantages(level="bilevel", lam=1.0)
    _, flat_N = advantages(level="token", lam=1.0)
    assert torch.allclose(both_N, flat_N, atol=1e-5)  # I4
    assert float((long_N - flat_N).abs().max()) > 1e-3


# --- groups that come too late


class Walk:
    """Three turns, then success or failure by the seed."""

    async def reset(self, task: Task, seed: int) -> Observation:
        self.luck, self.left = random.Random(seed), 3
        return Observation("go")

    async def step(self, action: Action) -> Step:
        self.left -= 1
        await asyncio.sleep(0)
        if self.left:
            return Step(Observation("on"))
        good = self.luck.random() < 0.5
        return Step(Observation("done"), {"outcome": float(good)}, End.success if good else End.failure)

    async def aclose(self) -> None:
        pass


class Served:
    """An endpoint and its publisher in memory; some replies outlast several updates."""

    delays = (0.0, 0.005, 0.0, 0.25, 0.02)

    def __init__(self) -> None:
        self.policy_version = self.serving = self.calls = 0
        self.publisher = self

    async def publish(self, path: Path, policy_version: int) -> None:
        self.serving = policy_version

    async def served_version(self) -> int:
        return self.serving

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int | None = None,
        tools: Sequence[ToolSpec] = (),
        timeout_s: float = 60.0,
    ) -> Completion:
        self.calls += 1
        sent, first = self.policy_version, self.serving
        await asyncio.sleep(self.delays[self.calls % len(self.delays)])
        prompt = [n % 5 for n in range(3 * len(messages))]
        versions = [first, self.serving]
        return Completion("a", [7, 8], [-2.5, -2.25], versions, prompt, "stop", (), sent, self.policy_version)

    async def aclose(self) -> None:
        pass


class Looking(PPO):
    """Keeps the batches it was given."""

    def update(self, batch: Batch) -> UpdateReport:
        self.batches = [*getattr(self, "batches", []), batch]
        return super().update(batch)


async def test_groups_dropped_as_stale_teach_the_critic_of_a_real_learner(tmp_path: Path) -> None:
    sizes = {"width": 16, "layers": 1, "heads": 2, "head_dim": 8, "mlp_width": 16, "max_context": 64}
    with_value_head(PolicyModel(ModelConfig(vocab_size=12, **sizes))).save(tmp_path / "model")
    learner = Looking(
        tmp_path / "model", off_policy="decoupled", parity="report", min_ess_ratio=0.0,
        replay=ReplayConfig(start_after=1, capacity_trajectories=1000, max_lag=1000),
    )  # fmt: skip
    report = await train(
        Runtime(Served(), limits=Limits(max_turns=8), max_concurrent=24), Walk, [Task(f"t{n}") for n in range(7)],
        learner=learner, run_dir=tmp_path / "run", updates=12, group_size=2, groups_per_batch=3, max_staleness=1,
        late="drop", worker="thread", seed=1,
    )  # fmt: skip
    stale = {t.id for batch in learner.batches for g in batch.stale for t in g.trajectories}
    trained = {t.id for batch in learner.batches for g in batch.groups for t in g.trajectories}
    assert stale
    assert not stale & trained
    assert len(trained) == 12 * 3 * 2
    last = report.history[-1]
    assert last["replay_taken"] == len(stale) + len(trained)
    assert max(row["replay_lag_max"] for row in report.history) > 1 >= max(row["lag_max"] for row in report.history)
    assert any(row.get("replay_target_vtrace") == 1 for row in report.history)
    assert sum(row["policy_tokens"] for row in report.history) == 12 * 3 * 2 * 6
    assert np.isfinite([row["replay_value_loss"] for row in report.history]).all()


# --- stopped and resumed, in a process of its own


def _replaying(folder: Path) -> PPO:
    return PPO(
        folder, off_policy="decoupled", parity="report", min_ess_ratio=0.0,
        replay=ReplayConfig(start_after=4, batch_trajectories=6, max_lag=1000),
    )  # fmt: skip


async def _trained(folder: Path, *, resume: bool) -> Any:
    return await train(
        Runtime(Served(), limits=Limits(max_turns=8), max_concurrent=24), Walk, [Task(f"t{n}") for n in range(7)],
        learner=_replaying(folder / "model"), run_dir=folder / "run", updates=6, group_size=2, groups_per_batch=3,
        max_staleness=1, late="drop", seed=1, worker="process", resume=resume,
    )  # fmt: skip


async def test_a_learner_with_replay_that_is_stopped_in_its_process_goes_on_as_if_it_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"width": 16, "layers": 1, "heads": 2, "head_dim": 8, "mlp_width": 16, "max_context": 64}
    PolicyModel(ModelConfig(vocab_size=12, **sizes)).save(tmp_path / "model")
    sent: list[Batch] = []
    reports: dict[int, UpdateReport] = {}
    third, update = asyncio.Event(), LearnerWorker.update

    async def listened(worker: LearnerWorker, batch: Batch) -> UpdateReport:
        sent.append(batch)
        number = len(sent)
        if number == 3:
            third.set()
        reports[number] = await update(worker, batch)
        return reports[number]

    monkeypatch.setattr(LearnerWorker, "update", listened)
    run = asyncio.ensure_future(_trained(tmp_path, resume=False))
    run.add_done_callback(lambda _: third.set())  # it failed: `await run` says how
    await third.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    stopped = int(max((tmp_path / "run" / "checkpoints").iterdir()).name.removeprefix("update-"))
    assert stopped in (2, 3)  # an update in progress is finished
    del sent[stopped:]
    report = await _trained(tmp_path, resume=True)
    assert report.updates == len(sent) == 6
    # The same batches for a learner that nobody stops: the same numbers in every update, the same state behind them.
    straight = _replaying(tmp_path / "model")
    straight.load(None)
    found = {number: straight.update(batch) for number, batch in enumerate(sent, 1)}
    assert reports.keys() >= {1, 2, 4, 5, 6}
    # As text: where nothing was fresh, the largest gap to the sampler is NaN, which equals no other.
    assert {number: repr(found[number]) for number in reports} == {n: repr(report) for n, report in reports.items()}
    assert reports[6].metrics["replay_taken"] == sum(len(_taken(batch)) for batch in sent) >= 6 * 3 * 2
    again = _replaying(tmp_path / "model")
    again.load(tmp_path / "run" / "checkpoints" / "update-000006")
    assert _state(again) == _state(straight)


def _taken(batch: Batch) -> list[Trajectory]:
    return [t for group in (*batch.groups, *batch.stale) for t in group.trajectories]


def _state(learner: PPO) -> dict[str, Any]:
    """Return all that a learner goes on from, as plain values."""
    policy, critic, replay = learner._state, learner._critic, learner._replay
    assert policy is not None
    assert critic is not None
    assert replay is not None
    weights = {"policy": policy.model, "critic": critic.model, "target": replay.target.module}
    generators = {"policy": policy.generator, "critic": critic.generator, "replay": replay.generator}
    return {
        "weights": {f"{n}.{k}": x.tolist() for n, model in weights.items() for k, x in model.state_dict().items()},
        "generators": {name: generator.get_state().tolist() for name, generator in generators.items()},
        "versions": (policy.updates, critic.version, replay.target.version),
        "store": msgspec.structs.asdict(replay.store.statistics()),
    }
