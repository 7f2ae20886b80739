"""What is learned from relabelled episodes: V where a policy would act, on the shopping environment."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from turngate.envs.base import End, Task
from turngate.envs.shopping import (
    SHOPPING_TOOLS,
    Goal,
    Noise,
    Shopper,
    ShoppingEnv,
    make_task,
    train_tasks,
    violations,
    vocabulary,
)
from turngate.envs.shopping.tasks import ShopTask
from turngate.learners.batch import lay_out
from turngate.learners.critic import Critic, CriticConfig, last_values, with_value_head
from turngate.learners.hindsight import HindsightStep, ValueExample, relabel, value_examples
from turngate.learners.hindsight_values import hindsight_value_batch
from turngate.learners.objective import Objective, UpdateData
from turngate.learners.off_policy_choice import OffPolicyName
from turngate.learners.replay import as_batch
from turngate.learners.turns import turn_tokens
from turngate.runtime import Context, Limits, Message, Runtime, full, last_turns
from turngate.runtime.context import History
from turngate.runtime.engine import Engine
from turngate.runtime.engine.chat import render
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import LearnerError
from turngate.runtime.rollout import run_rollout
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.types import Sampling, Trajectory, Turn

TOKENIZER = Tokenizer.train([" ".join(vocabulary())])
SHAPE = {"width": 32, "layers": 2, "heads": 2, "head_dim": 16, "mlp_width": 64, "max_context": 512}


def critic_of(seed: int = 0, **config: object) -> Critic:
    """Return a critic of a fresh model, whose values are all equal."""
    model = PolicyModel(ModelConfig(vocab_size=len(TOKENIZER), **SHAPE), seed=seed)
    return Critic(with_value_head(model), CriticConfig(**config), seed=1, microbatch_tokens=4096)


def outspoken(critic: Critic) -> Critic:
    """Return the critic after its head has learned to say something of everything."""
    assert critic.model.value_head is not None
    with torch.no_grad():
        critic.model.value_head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    return critic


def shopped(task: Task, seed: int) -> Trajectory:
    """Play an episode of a shopper that overlooks most of what is wrong."""
    shopper = Shopper(Noise(miss=0.9), random.Random(seed))
    endpoint = FakeEndpoint(lambda messages: shopper.act(messages[-1].content))
    return run_virtual(run_rollout(ShoppingEnv, task, endpoint, seed=seed, trajectory_id=f"t{seed}"))


def bought_on_purpose(trajectory: Trajectory) -> Trajectory | None:
    """Return the episode as if what it bought had been wanted; None when it bought nothing that a task asks for."""
    last = trajectory.turns[-1]
    state = last.state
    assert state is not None
    problem = msgspec.convert(trajectory.task.data, ShopTask)
    item = next((item for item in problem.items if item.id == state["open"]), None)
    is_bought = last.valid and last.text.startswith("buy")
    if not is_bought or item is None or item.rating < 3 or state["selected"] is None:
        return None
    goal = Goal(item.category, item.use, state["selected"], 10 * (item.price // 10 + 1), 3)
    task = make_task(goal, problem.items)

    def reward(turn: Turn, _: Task) -> HindsightStep:
        if turn is not last:
            return HindsightStep(0.0)
        is_right = not violations(goal, item)
        return HindsightStep(float(is_right), End.success if is_right else End.failure)

    return relabel(trajectory, task, reward, restate=lambda text: text.replace(trajectory.task.prompt, task.prompt))


def relabelled_failures(n: int, seed: int) -> list[Trajectory]:
    """Return what came of the failures among `n` episodes."""
    played = [shopped(task, seed * 1000 + i) for i, task in enumerate(train_tasks(n, seed))]
    failures = [trajectory for trajectory in played if trajectory.end is End.failure]
    return [made for made in map(bought_on_purpose, failures) if made is not None]


def examples_of(trajectories: Sequence[Trajectory], gamma: float = 1.0) -> list[ValueExample]:
    return [example for trajectory in trajectories for example in value_examples(trajectory, gamma=gamma)]


def test_learning_from_relabelled_failures_raises_the_value_of_such_contexts() -> None:
    seen, unseen = relabelled_failures(80, seed=1), relabelled_failures(30, seed=2)
    assert all(trajectory.end is End.success for trajectory in (*seen, *unseen))
    assert min(len(seen), len(unseen)) > 5
    critic = critic_of(epochs=1)
    examples = examples_of(seen, gamma=0.8)
    tokens, before = hindsight_value_batch(examples_of(unseen, gamma=0.8), critic, TOKENIZER)
    assert before.old_N[before.mask_N].tolist() == [0.5] * len(tokens.row_lengths)
    losses = [critic.learn(*hindsight_value_batch(examples, critic, TOKENIZER))["value_loss"] for _ in range(8)]
    values, targets = critic.values(tokens)[before.mask_N], before.targets_N[before.mask_N]
    assert losses[-1] < losses[0]
    assert float(values.mean()) > 0.65
    # And by how far from the end they are, not all alike: on tasks that were not among those learned from.
    assert float((values - targets).square().mean()) < 0.7 * float((0.5 - targets).square().mean())
    assert float(torch.corrcoef(torch.stack([values, targets]))[0, 1]) > 0.5


# --- where the value is read


END = (None, None, End.failure)


@pytest.mark.parametrize("context", [full(), last_turns(1)])
async def test_values_are_those_before_the_first_token_of_a_policys_action(tmp_path: Path, context: Context) -> None:
    critic = outspoken(critic_of(kind="scalar"))
    PolicyModel(ModelConfig(vocab_size=len(TOKENIZER), **SHAPE)).save(tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    async with Engine.start(tmp_path, mode="thread") as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=3), context=context, sampling=Sampling(max_tokens=8))
        played = await runtime.rollout(ShoppingEnv, train_tasks(1, seed=3)[0], seed=0)
    assert len(played.turns) == 3
    told = relabel(played, played.task, lambda turn, _: HindsightStep(0.0, END[turn.index]), restate=str)
    shown = [example._replace(messages=tuple(context(History.of(example.messages)))) for example in examples_of([told])]
    tokens, targets = hindsight_value_batch(shown, critic, TOKENIZER)
    # The engine's own tokens, as the policy is trained on them.
    acted = lay_out(as_batch([played], policy_version=0), [[True]], vocabulary_size=len(TOKENIZER))
    first = [int(at[0]) for at in turn_tokens(acted)[0].values()]
    assert len(first) == len(shown)
    assert targets.old_N[targets.mask_N].tolist() == pytest.approx(critic.values(acted)[first].tolist(), abs=1e-5)
    rows = tokens.token_ids_N.split(list(tokens.row_lengths))
    for turn, row_T in zip(played.turns, rows, strict=True):
        assert row_T[:-1].tolist() == list(played.segments[turn.segment].ids())[: turn.start]


def an_example(target: float = 1.0, words: str = "Find a red hat") -> ValueExample:
    return ValueExample((Message("user", words),), target)


def test_rows_have_their_target_behind_the_last_token_of_their_history() -> None:
    critic = outspoken(critic_of(kind="scalar"))
    examples = [an_example(0.25), an_example(3.0, "Find a blue lamp under $40 rated at least three stars")]
    tokens, targets = hindsight_value_batch(examples, critic, TOKENIZER)
    contexts = [render(example.messages, TOKENIZER) for example in examples]
    assert tokens.row_lengths == tuple(len(ids) + 1 for ids in contexts)
    assert targets.mask_N.nonzero().flatten().tolist() == [len(contexts[0]), sum(tokens.row_lengths) - 1]
    assert targets.targets_N[targets.mask_N].tolist() == [0.25, 3.0]
    values = last_values(critic.model, contexts, critic.config, microbatch_tokens=100)
    assert targets.old_N[targets.mask_N].tolist() == pytest.approx(values.tolist(), abs=1e-5)


def test_tools_on_offer_are_part_of_what_the_policy_saw() -> None:
    critic = outspoken(critic_of())
    tokens, _ = hindsight_value_batch([an_example()], critic, TOKENIZER, tools=SHOPPING_TOOLS[:1])
    expected = render(an_example().messages, TOKENIZER, tools=SHOPPING_TOOLS[:1])
    assert tokens.token_ids_N[:-1].tolist() == expected


def test_no_example_is_nothing_to_learn() -> None:
    critic = critic_of()
    tokens, targets = hindsight_value_batch([], critic, TOKENIZER)
    assert tokens.row_lengths == ()
    assert critic.learn(tokens, targets) == {"value_loss": 0.0, "value_grad_norm": 0.0}


# --- what is refused


@pytest.mark.parametrize("off_policy", ["decoupled", "bypass", "reinforce"])
def test_a_ratio_on_a_relabelled_context_is_refused(off_policy: OffPolicyName) -> None:
    tokens, targets = hindsight_value_batch([an_example()], critic_of(), TOKENIZER)
    data = UpdateData(tokens, targets.targets_N, torch.zeros(len(tokens.mask_N)), None, ~tokens.mask_N, "token_mean")
    with pytest.raises(LearnerError, match="behaviour log-probs must be finite"):
        Objective(off_policy=off_policy).importance(data, tokens.mask_N)


@pytest.mark.parametrize(
    ("kind", "target", "why"),
    [
        ("success", 1.5, r"within \[0, 1\] for a critic of success: got 1.5 \(example 1\)"),
        ("success", -0.5, r"got -0.5 \(example 1\); CriticConfig\(kind='scalar'\)"),
        ("scalar", math.nan, r"returns must be finite: got nan \(example 1\)"),
    ],
)
def test_returns_that_no_value_stands_for_are_refused(kind: str, target: float, why: str) -> None:
    with pytest.raises(LearnerError, match=why):
        hindsight_value_batch([an_example(), an_example(target)], critic_of(kind=kind), TOKENIZER)


def test_histories_that_no_policy_acts_from_are_refused() -> None:
    with pytest.raises(LearnerError, match=r"room for a token in a context of 512: got \d+ tokens \(example 0\)"):
        hindsight_value_batch([an_example(words="hat " * 600)], critic_of(), TOKENIZER)
    other = Critic(
        with_value_head(PolicyModel(ModelConfig(vocab_size=16, **SHAPE))), CriticConfig(), seed=1, microbatch_tokens=99
    )
    with pytest.raises(LearnerError, match="in the vocabulary of 16: got"):
        hindsight_value_batch([an_example()], other, TOKENIZER)
