"""Hindsight: what an episode would have been worth for another goal, and which turns its return is owed to.

A relabelled episode was acted under another prompt than it now shows: its behaviour log-probs say nothing about it.
Critics and supervised learning may use it; every ratio on it is refused.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from random import Random
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from turngate.envs.base import End, Task
from turngate.learners.ratios import check_shapes
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.opening import opening_messages
from turngate.runtime.types import Message, Trajectory, Turn

__all__ = [
    "GoalStrategy",
    "HindsightStep",
    "ValueExample",
    "cut_at_end",
    "goal_steps",
    "hindsight_dialogues",
    "hindsight_distribution",
    "hindsight_goal",
    "redistribute_return",
    "relabel",
    "return_conditional_credit",
    "value_examples",
]

G = TypeVar("G")

GoalStrategy: TypeAlias = Literal["final", "future", "episode"]
"""What the episode reached last; at a random turn from `after` on; at any turn."""

RELABELLED = (
    "its goal was relabelled in hindsight, so its actions were sampled under another prompt; train a critic on it "
    "(value_examples) or imitate it (hindsight_dialogues), never form a ratio"
)


class HindsightStep(NamedTuple):
    """What a turn leads to under the new goal."""

    reward: float
    end: End | None = None
    """A terminal end when the task would have been over, None while it would have gone on."""


class ValueExample(NamedTuple):
    """One regression target for a critic."""

    messages: tuple[Message, ...]
    """The history before a turn, the new goal stated."""
    target: float
    """Discounted return from that turn on."""


def hindsight_goal(
    achieved: Sequence[G | None], *, strategy: GoalStrategy = "final", after: int = 0, random: Random | None = None
) -> G | None:
    """Return a goal that one episode has reached; None when it reached none there.

    Source: Andrychowicz et al. 2017, HER (1707.01495), section 3.3.
    Args: achieved: what stood reached after each turn of this one episode, None for nothing. after: the first turn
    that `future` may look at. random: draws for `future` and `episode`.
    """
    if strategy not in ("final", "future", "episode"):
        raise ConfigError(f"strategy must be final, future or episode: got {strategy!r}")
    if not 0 <= after <= len(achieved):
        raise ConfigError(f"after must be a turn of the episode: got {after} of {len(achieved)}")
    reached = [goal for goal in achieved[after if strategy == "future" else 0 :] if goal is not None]
    if strategy == "final":
        return achieved[-1] if achieved else None
    if random is None:
        raise ConfigError(f"random must be given for strategy {strategy!r}")
    return random.choice(reached) if reached else None


def goal_steps(
    achieved: Sequence[G | None], goal: G, *, is_same: Callable[[G, G], bool] = operator.eq
) -> list[HindsightStep]:
    """Return the steps of an episode whose task is over, and paid 1, once `goal` is reached; cut there."""
    reached = [state is not None and is_same(state, goal) for state in achieved]
    return cut_at_end([HindsightStep(float(r), End.success if r else None) for r in reached])


def cut_at_end(steps: Iterable[HindsightStep]) -> list[HindsightStep]:
    """Return the steps up to the first that ends the task; nothing that happened later belongs to it."""
    kept: list[HindsightStep] = []
    for step in steps:
        kept.append(step)
        if step.end is not None:
            break
    return kept


def relabel(
    trajectory: Trajectory,
    goal: Task,
    reward_fn: Callable[[Turn, Task], HindsightStep],
    *,
    restate: Callable[[str], str],
) -> Trajectory:
    """Return the episode as it would have gone for another task: rewards and termination anew, cut where that is over.

    Not trainable: token arrays and scores belong to the old goal and are left out.
    Args: goal: the task in whose light to look at it. reward_fn: the environment's word on each turn under that task.
    restate: puts the new goal where the messages before the first action state the old one.
    Raises: LearnerError: a failed episode, or one that had reached an end of its own and that the new task neither ends
    nor continues; a reward that is not finite; an end that is not terminal.
    """
    if trajectory.end.is_failure:
        raise LearnerError(
            f"a failed episode cannot be relabelled: got end {trajectory.end.value} (trajectory {trajectory.id})"
        )
    steps = cut_at_end(reward_fn(turn, goal) for turn in trajectory.turns)
    for turn, step in zip(trajectory.turns, steps, strict=False):
        _check_step(step, f"trajectory {trajectory.id}, turn {turn.index}")
    end = (steps[-1].end if steps else None) or trajectory.end
    if end.is_terminal and not (steps and steps[-1].end):
        raise LearnerError(
            f"termination must be told anew: the episode ended in {end.value} under its old task, and reward_fn says "
            f"of no turn how the new one ends (trajectory {trajectory.id}); return an end for the last turn"
        )
    origin = trajectory.restarted_from
    return msgspec.structs.replace(
        trajectory,
        id=f"{trajectory.id}.hindsight",
        group_id="",  # its siblings had another task: no baseline of theirs fits
        task=goal,
        # Unless the episode began behind other turns, it is the prompt that states the goal.
        first_observation=restate(trajectory.first_observation) if origin is None else trajectory.first_observation,
        restarted_from=None if origin is None else msgspec.structs.replace(origin, scores=()),
        turns=tuple(_retold(turn, step) for turn, step in zip(trajectory.turns, steps, strict=False)),
        segments=(),
        end=end,
        messages=_restated(trajectory, len(steps), restate),
        last_context=b"",
        last_context_is_whole=False,
        trainable=False,
        untrainable_because=RELABELLED,
    )


def hindsight_dialogues(trajectories: Iterable[Trajectory]) -> list[tuple[Message, ...]]:
    """Return the conversations of relabelled successes, to imitate with `clone`.

    Left out are episodes that did not succeed, and those with replies that are not the policy's own in this episode,
    injected ones and those before a restart: cloning would imitate them, too.
    Raises: LearnerError: an episode was not relabelled.
    """
    chosen = [_relabelled(trajectory) for trajectory in trajectories]
    return [t.messages for t in chosen if t.end is End.success and not _is_helped(t)]


def value_examples(trajectory: Trajectory, *, gamma: float) -> list[ValueExample]:
    """Return the history before each turn of a relabelled episode with the discounted return that followed it.

    Episodes that were cut short give none: what would have followed is not known. `hindsight_value_batch` makes
    of examples what a critic learns from.
    Raises: LearnerError: the episode was not relabelled, or its messages do not hold its turns.
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma must be from 0 to 1: got {gamma}")
    if not _relabelled(trajectory).end.is_terminal:
        return []
    opening = len(opening_messages(trajectory))
    starts = [i for i, m in enumerate(trajectory.messages) if m.role == "assistant" and i >= opening]
    if len(starts) != len(trajectory.turns):
        raise LearnerError(
            f"messages must hold one reply per turn: expected {len(trajectory.turns)}, got {len(starts)} "
            f"(trajectory {trajectory.id})"
        )
    examples: list[ValueExample] = []
    target = 0.0
    for start, turn in zip(reversed(starts), reversed(trajectory.turns), strict=True):
        target = turn.reward + gamma * target
        examples.append(ValueExample(trajectory.messages[:start], target))
    return examples[::-1]


def hindsight_distribution(probs_K: Tensor, likelihoods_K: Tensor) -> Tensor:
    """Return h(a | h, Z), which action led to a return of Z: probs times P(Z | a), normalised; (K,).

    The exact answer that a learned classifier approximates. Zeros when Z cannot happen.
    """
    check_shapes(probs=probs_K, likelihoods=likelihoods_K)
    joint_K = probs_K.detach().to(torch.float64) * likelihoods_K.detach().to(torch.float64)
    total = joint_K.sum()
    return (joint_K / total if total > 0 else torch.zeros_like(joint_K)).to(probs_K.dtype)


def return_conditional_credit(
    probs: Tensor, hindsight_probs: Tensor, returns: Tensor, *, max_ratio: float = 10.0
) -> Tensor:
    """Return (1 - pi(a|h) / h(a|h,Z)) * Z per action taken, detached: its mean over episodes is the advantage.

    An action as likely in hindsight as before gets nothing, whatever the return.
    Source: Harutyunyan et al. 2019 (1912.02503), theorem 2.
    Args: probs: of the action under the policy. hindsight_probs: given the return as well. max_ratio: bounds
    pi / h, which explodes where a classifier calls impossible what happened; the bound is a bias.
    """
    check_shapes(probs=probs, hindsight_probs=hindsight_probs, returns=returns)
    if not max_ratio > 0:
        raise ConfigError(f"max_ratio must be positive: got {max_ratio}")
    policy, hindsight, z = (x.detach().to(torch.float64) for x in (probs, hindsight_probs, returns))
    for name, values in (("probs", policy), ("hindsight_probs", hindsight)):
        if not ((values >= 0) & (values <= 1)).all():  # NaN is neither
            raise LearnerError(f"{name} must be from 0 to 1: got {values.tolist()}")
    if not z.isfinite().all():
        raise LearnerError(f"returns must be finite: got {z.tolist()}")
    ratio = torch.where(hindsight > 0, policy / hindsight.clamp(min=1e-300), math.inf).clamp(max=max_ratio)
    return torch.where(z == 0, 0.0, (1 - ratio) * z).to(probs.dtype)


def redistribute_return(predicted_T: Tensor, final_return: float) -> Tensor:
    """Return rewards (T,) that pay each turn what it changed in the predicted return; they add up to `final_return`.

    The predictor's error at the end is spread evenly over the turns.
    Source: Arjona-Medina et al. 2019, RUDDER (1806.07857), section 3.
    Args: predicted_T: the return predicted from the history after each turn; before the first it counts as 0.
    """
    if predicted_T.ndim != 1 or not predicted_T.isfinite().all() or not math.isfinite(final_return):
        raise LearnerError(
            f"predictions must be finite, one per turn: got {predicted_T.tolist()} for a return of {final_return}"
        )
    if not len(predicted_T):
        if final_return:
            raise LearnerError(f"a return needs turns to be owed to: got {final_return} and none")
        return predicted_T.clone()
    predicted = predicted_T.detach().to(torch.float64)
    changes = torch.diff(predicted, prepend=torch.zeros_like(predicted[:1]))
    rewards_T = (changes + (final_return - changes.sum()) / len(changes)).to(predicted_T.dtype)
    # What rounding has left goes to the smallest reward, the finest of them, so that the sum is kept, not nearly kept.
    smallest = int(rewards_T.abs().argmin())
    others = [-reward for t, reward in enumerate(rewards_T.tolist()) if t != smallest]
    rewards_T[smallest] = math.fsum([final_return, *others])
    return rewards_T


def _check_step(step: HindsightStep, where: str) -> None:
    if not math.isfinite(step.reward):
        raise LearnerError(f"reward_fn must give finite rewards: got {step.reward} ({where})")
    if step.end is not None and not step.end.is_terminal:
        raise LearnerError(f"reward_fn must give terminal ends or None: got {step.end.value} ({where})")


def _retold(turn: Turn, step: HindsightStep) -> Turn:
    # No tokens: `length` 0 is how a record says that none of the policy's are here.
    return msgspec.structs.replace(
        turn, segment=0, start=0, length=0, rewards={"outcome": step.reward}, scores={}, snapshot=None
    )


def _restated(trajectory: Trajectory, turns: int, restate: Callable[[str], str]) -> tuple[Message, ...]:
    """Return the history up to the answer to the last of `turns`, with the goal before the first action restated."""
    opening = opening_messages(trajectory)
    prompts = list(takewhile(lambda message: message.role != "assistant", opening))
    kept = [msgspec.structs.replace(message, content=restate(message.content)) for message in prompts]
    kept += opening[len(prompts) :]
    replies = 0
    for message in trajectory.messages[len(opening) :]:
        replies += message.role == "assistant"
        if replies > turns:
            break
        kept.append(message)
    return tuple(kept)


def _is_helped(trajectory: Trajectory) -> bool:
    return trajectory.restarted_from is not None or any(turn.injected for turn in trajectory.turns)


def _relabelled(trajectory: Trajectory) -> Trajectory:
    if trajectory.untrainable_because != RELABELLED:
        raise LearnerError(f"the episode must come from relabel(): got trajectory {trajectory.id}")
    return trajectory
