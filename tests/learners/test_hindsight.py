"""Relabelling, return-conditional credit, return redistribution. Numbers worked by hand."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import End, Task
from turngate.learners.batch import lay_out
from turngate.learners.hindsight import (
    HindsightStep,
    cut_at_end,
    goal_steps,
    hindsight_dialogues,
    hindsight_distribution,
    hindsight_goal,
    redistribute_return,
    relabel,
    return_conditional_credit,
    value_examples,
)
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Batch, Group, Message, RestartedFrom, Segment, Snapshot, Trajectory, Turn

GOAL = Task("buy B", "Get B.")


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def episode(*reached: str, end: End = End.failure, injected: int = 0) -> Trajectory:
    """One turn per thing reached; the first turns are not the policy's."""
    turns = []
    messages = [Message("system", "Rules."), Message("user", "Get Z.")]
    for i, thing in enumerate(reached):
        turns.append(
            Turn(
                index=i,
                segment=0,
                start=2 * i + 1,
                length=1,
                text=f"take {thing}",
                observation=f"now {thing}",
                state={"has": thing},
                rewards={"outcome": 0.0, "luck": 1.0},
                scores={"judge": 0.5},
                snapshot=Snapshot("shop", b""),
                injected=i < injected,
            )
        )
        messages += [Message("assistant", f"take {thing}"), Message("user", f"now {thing}")]
    n = len(reached)
    columns = ([3, 4] * n, [0, 1] * n, [0.0, -0.5] * n, [-1, 0] * n, [x for i in range(n) for x in (-1, i)])
    return Trajectory(
        id="t",
        task=Task("buy Z", "Get Z."),
        group_id="g0",
        first_observation="Get Z.",
        turns=tuple(turns),
        segments=(Segment.of(*columns),),
        end=end,
        messages=tuple(messages),
        last_context=b"1234",
    )


def has_goal(turn: Turn, goal: Task) -> HindsightStep:
    assert turn.state is not None
    reached = goal.id.endswith(turn.state["has"])
    return HindsightStep(float(reached), End.success if reached else None)


def restate(text: str) -> str:
    return text.replace("Get Z.", "Get B.")


def relabelled(*reached: str, **fields: object) -> Trajectory:
    return relabel(episode(*reached, **fields), GOAL, has_goal, restate=restate)


# --- goals


def test_final_goal_is_what_was_reached_last() -> None:
    assert hindsight_goal(["A", "B", "C"]) == "C"
    assert hindsight_goal(["A", None]) is None
    assert hindsight_goal([]) is None


def test_future_goals_are_drawn_from_the_turns_still_to_come() -> None:
    drawn = {hindsight_goal("ABCD", strategy="future", after=2, random=random.Random(i)) for i in range(50)}
    assert drawn == {"C", "D"}
    drawn = {hindsight_goal("ABCD", strategy="episode", random=random.Random(i)) for i in range(100)}
    assert drawn == set("ABCD")


def test_turns_that_reached_nothing_are_no_goals() -> None:
    for i in range(20):
        assert hindsight_goal([None, "B", None], strategy="future", random=random.Random(i)) == "B"
    assert hindsight_goal([None], strategy="future", random=random.Random(0)) is None


def test_b7_3_future_goals_never_come_from_another_episode() -> None:
    """thu-ml/tianshou#811: indices into a shared buffer ran over the end of an episode into the next one. Here a goal
    is drawn from one episode's own turns, and behind its last turn there is none."""
    first, second = ["A", "B"], ["C", "D"]
    for i, after in itertools.product(range(20), range(2)):
        assert hindsight_goal(first, strategy="future", after=after, random=random.Random(i)) in first[after:]
        assert hindsight_goal(second, strategy="future", after=after, random=random.Random(i)) in second[after:]
    assert hindsight_goal(first, strategy="future", after=2, random=random.Random(0)) is None
    with pytest.raises(ConfigError, match="after must be a turn of the episode: got 3 of 2"):
        hindsight_goal(first, strategy="future", after=3, random=random.Random(0))


def test_goal_choices_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="strategy must be final, future or episode"):
        hindsight_goal("A", strategy="best")
    with pytest.raises(ConfigError, match="random must be given"):
        hindsight_goal("A", strategy="future")


# --- relabelling


def test_b7_3_relabelled_episode_ends_where_its_new_goal_is_reached() -> None:
    """DLR-RM/stable-baselines3#627: relabelled rewards without relabelled dones bootstrap behind the goal."""
    trajectory = relabelled("A", "B", "C", "B")
    assert trajectory.end is End.success
    assert [turn.rewards for turn in trajectory.turns] == [{"outcome": 0.0}, {"outcome": 1.0}]
    assert [m.content for m in trajectory.messages] == ["Rules.", "Get B.", "take A", "now A", "take B", "now B"]
    assert trajectory.task == GOAL


def test_steps_are_cut_behind_the_first_end() -> None:
    steps = [HindsightStep(0.0), HindsightStep(0.5, End.failure), HindsightStep(1.0, End.success)]
    assert cut_at_end(steps) == steps[:2]
    assert goal_steps(["A", None, "B", "B"], "B") == [
        HindsightStep(0.0),
        HindsightStep(0.0),
        HindsightStep(1.0, End.success),
    ]
    assert len(goal_steps([1.0, 1.9, 3.0], 2.0, is_same=lambda a, b: abs(a - b) < 0.2)) == 2


def test_reward_is_asked_for_no_turn_behind_the_end() -> None:
    asked: list[int] = []

    def count(turn: Turn, goal: Task) -> HindsightStep:
        asked.append(turn.index)
        return has_goal(turn, goal)

    relabel(episode("A", "B", "C"), GOAL, count, restate=restate)
    assert asked == [0, 1]


def test_nothing_of_the_old_goal_is_left() -> None:
    trajectory = relabelled("A", "B")
    assert (trajectory.segments, trajectory.last_context, trajectory.group_id) == ((), b"", "")
    assert all((t.scores, t.snapshot, t.length) == ({}, None, 0) for t in trajectory.turns)
    assert trajectory.id == "t.hindsight"
    assert trajectory.policy_tokens == 0
    assert trajectory.first_observation == "Get B."


def test_a_policy_ratio_on_a_relabelled_episode_is_refused_with_the_reason() -> None:
    trajectory = relabelled("A", "B")
    batch = Batch(groups=(Group(id="g", task=GOAL, order=0, trajectories=(trajectory,)),), policy_version=0)
    with pytest.raises(LearnerError, match=r"goal was relabelled in hindsight.*never form a ratio"):
        lay_out(batch, [[True]], vocabulary_size=8)


def test_truncated_episode_that_misses_the_new_goal_too_stays_truncated() -> None:
    assert relabelled("A", "C", end=End.turn_limit).end is End.turn_limit


def test_old_end_does_not_stand_for_the_new_one() -> None:
    with pytest.raises(LearnerError, match="termination must be told anew: the episode ended in failure"):
        relabelled("A", "C")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (HindsightStep(math.nan), r"finite rewards: got nan .*turn 0"),
        (HindsightStep(1.0, End.timeout), "terminal ends or None: got timeout"),
    ],
)
def test_rewards_and_ends_that_are_none_are_refused(step: HindsightStep, message: str) -> None:
    with pytest.raises(LearnerError, match=message):
        relabel(episode("A"), GOAL, lambda turn, goal: step, restate=restate)


def test_failed_episodes_cannot_be_relabelled() -> None:
    with pytest.raises(LearnerError, match="a failed episode cannot be relabelled: got end env_error"):
        relabelled("B", end=End.env_error)


# --- what relabelled episodes are for


def test_dialogues_to_imitate_are_successes_of_the_policys_own() -> None:
    success = relabelled("A", "B")
    cut = relabelled("A", end=End.turn_limit)
    helped = relabelled("A", "B", injected=1)
    assert hindsight_dialogues([success, cut, helped]) == [success.messages]


def restarted(*reached: str) -> Trajectory:
    """An episode that began behind a turn of another one."""
    trajectory = episode(*reached)
    head, rest = trajectory.messages[:2], trajectory.messages[2:]
    before = (Message("assistant", "take Y"), Message("user", "now Y"))
    origin = RestartedFrom("other", 1, 0, "invalid", (("judge", 0.5),))
    return msgspec.structs.replace(
        trajectory, messages=head + before + rest, restarted_from=origin, first_observation="now Y"
    )


def test_turns_before_a_restart_are_context_and_not_imitated() -> None:
    trajectory = relabel(restarted("A", "B", "C"), GOAL, has_goal, restate=restate)
    said = ["Rules.", "Get B.", "take Y", "now Y", "take A", "now A", "take B", "now B"]
    assert [m.content for m in trajectory.messages] == said
    assert [len(example.messages) for example in value_examples(trajectory, gamma=1.0)] == [4, 6]
    assert trajectory.first_observation == "now Y"
    assert trajectory.restarted_from == RestartedFrom("other", 1, 0, "invalid")
    assert hindsight_dialogues([trajectory]) == []


def test_critic_gets_each_history_with_the_return_that_followed() -> None:
    examples = value_examples(relabelled("A", "C", "B"), gamma=0.5)
    assert [example.target for example in examples] == [0.25, 0.5, 1.0]
    assert [example.messages[-1].content for example in examples] == ["Get B.", "now A", "now C"]


def test_cut_episodes_give_a_critic_no_return() -> None:
    assert value_examples(relabelled("A", end=End.turn_limit), gamma=1.0) == []


@pytest.mark.parametrize("use", [lambda t: hindsight_dialogues([t]), lambda t: value_examples(t, gamma=1.0)])
def test_episodes_that_were_not_relabelled_are_refused(use: Callable[[Trajectory], object]) -> None:
    with pytest.raises(LearnerError, match=r"must come from relabel\(\): got trajectory t"):
        use(episode("A"))


def test_messages_without_the_turns_are_refused() -> None:
    trajectory = msgspec.structs.replace(relabelled("A", "B"), messages=())
    with pytest.raises(LearnerError, match="messages must hold one reply per turn: expected 2, got 0"):
        value_examples(trajectory, gamma=1.0)


# --- return-conditional credit


def exact_advantages(policy: Sequence[float], success: Sequence[float]) -> list[float]:
    baseline = sum(p * s for p, s in zip(policy, success, strict=True))
    return [s - baseline for s in success]


chances = st.floats(0.05, 0.95)


@given(st.lists(st.tuples(chances, chances), min_size=1, max_size=5))
def test_mean_credit_is_the_advantage_when_hindsight_is_exact(actions: list[tuple[float, float]]) -> None:
    total = sum(p for p, _ in actions)
    policy, success = f64(*(p / total for p, _ in actions)), f64(*(s for _, s in actions))
    hindsight = hindsight_distribution(policy, success)
    credit = return_conditional_credit(policy, hindsight, torch.ones_like(policy), max_ratio=math.inf)
    expected = exact_advantages(policy.tolist(), success.tolist())
    assert (success * credit).tolist() == pytest.approx(expected, abs=1e-9)  # failures have a return of 0


def test_action_no_likelier_in_hindsight_gets_nothing() -> None:
    assert return_conditional_credit(f64(0.3), f64(0.3), f64(5.0)).tolist() == [0.0]


def test_ratio_is_bounded_where_hindsight_calls_impossible_what_happened() -> None:
    credit = return_conditional_credit(f64(0.5, 0.5), f64(0.0, 0.001), f64(1.0, 2.0), max_ratio=4.0)
    assert credit.tolist() == [-3.0, -6.0]


def test_no_return_is_no_credit_even_without_a_bound() -> None:
    assert return_conditional_credit(f64(0.5), f64(0.0), f64(0.0), max_ratio=math.inf).tolist() == [0.0]


def test_impossible_return_has_no_hindsight() -> None:
    assert hindsight_distribution(f64(0.5, 0.5), f64(0.0, 0.0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("probs", "hindsight", "returns", "message"),
    [
        (f64(1.5), f64(0.5), f64(1.0), "probs must be from 0 to 1"),
        (f64(0.5), f64(math.nan), f64(1.0), "hindsight_probs must be from 0 to 1"),
        (f64(0.5), f64(0.5), f64(math.inf), "returns must be finite"),
        (f64(0.5, 0.5), f64(0.5), f64(1.0), "must have one shape"),
    ],
)
def test_numbers_that_are_no_probabilities_are_refused(probs, hindsight, returns, message: str) -> None:
    with pytest.raises(LearnerError, match=message):
        return_conditional_credit(probs, hindsight, returns)


# --- return redistribution


def test_turns_are_paid_what_they_changed_in_the_prediction() -> None:
    rewards = redistribute_return(f64(0.25, 0.75, 0.5), 1.25)
    assert rewards.tolist() == [0.5, 0.75, 0.0]  # changes 0.25, 0.5, -0.25, and 0.75 of error in three parts


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(-5, 5), st.sampled_from(["float32", "float64"]))
def test_redistributed_rewards_add_up_to_the_return(predicted: list[float], final: float, dtype: str) -> None:
    rewards = redistribute_return(torch.tensor(predicted, dtype=getattr(torch, dtype)), final)
    assert rewards.dtype is getattr(torch, dtype)
    # One rounding, of the smallest reward, which takes up the rest: itself a few roundings. And one of the sum itself.
    eps, sizes = torch.finfo(rewards.dtype).eps, rewards.abs()
    rounding = eps * (float(sizes.min()) + len(sizes) * eps * float(sizes.max())) + 1e-37
    assert math.fsum(rewards.tolist()) == pytest.approx(final, rel=2e-16, abs=rounding)


def test_episode_without_turns_can_be_owed_nothing() -> None:
    assert redistribute_return(torch.zeros(0), 0.0).tolist() == []
    with pytest.raises(LearnerError, match="a return needs turns"):
        redistribute_return(torch.zeros(0), 1.0)


def test_predictions_that_are_not_finite_are_refused() -> None:
    with pytest.raises(LearnerError, match="predictions must be finite"):
        redistribute_return(f64(math.nan), 1.0)
