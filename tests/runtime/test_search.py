"""Accounts of a search tree."""

import math
from random import Random

import pytest

from turngate.envs.base import Action, ToolCall
from turngate.runtime.search import (
    Leaf,
    Played,
    StateNode,
    action_key,
    backup,
    descend,
    uct_scores,
)


def ended(text, reward):
    return Played(Action(text), reward, b"", None)


def went_on(text, state, reward=0.0):
    return Played(Action(text), reward, state.encode(), state)


def simulate(root, play, *, random, draws=2, **settings):
    """Run one simulation; `play(state, action)` returns the steps from a state, the first of them `action` if given."""
    leaf = descend(root, draws=draws, random=random, **settings)
    path = list(leaf.path)
    if leaf.node is not None:
        played = play(leaf.node.state, leaf.action.action if leaf.action else None)
        path += leaf.node.grow(played, first_is_drawn=leaf.action is None)
    return backup(path)


def test_b5_4_means_are_divided_by_visits_once():
    scores = uct_scores([2.0, 1.0], [3, 1])
    assert scores == pytest.approx([2 / 3 + math.sqrt(2 * math.log(4) / 3), 1 + math.sqrt(2 * math.log(4))])


def test_an_action_never_tried_comes_first():
    assert uct_scores([0.0, 5.0], [0, 5])[0] == math.inf


def test_b5_4_equal_actions_share_one_node_and_their_visits_add():
    """LATS divides a running mean by visits again, and scores duplicates 0."""
    root = StateNode("start")
    for text, reward in (("a", 1.0), ("a", 0.0), ("b", 1.0), ("a", 1.0)):
        backup(root.grow([ended(text, reward)]))
    a, b = root.actions.values()
    assert (a.draws, a.visits, a.total) == (3, 3, 2.0)
    assert a.mean == pytest.approx(2 / 3)
    assert (b.visits, b.mean) == (1, 1.0)
    assert (root.visits, root.draws) == (4, 4)
    expected = uct_scores([2.0, 1.0], [3, 1], exploration=0.1)
    assert root.select(0.1) is (b if expected[1] > expected[0] else a)
    assert root.best() is a


def test_calls_are_equal_whatever_their_ids():
    first, second = (Action("", (ToolCall(call_id, "buy", "{}"),)) for call_id in "ab")
    other = Action("", (ToolCall("a", "buy", '{"item": 1}'),))
    assert action_key(first) == action_key(second) != action_key(other)
    root = StateNode("start")
    assert root.add(first) is root.add(second)


def test_a_visit_counts_the_return_from_its_own_action_on():
    root = StateNode("start")
    path = root.grow([went_on("a", "s", 0.25), ended("b", 1.0)])
    assert backup(path, gamma=0.5) == 0.25 + 0.5 * 1.0
    assert [node.total for node, _ in path] == [0.75, 1.0]
    cut = root.grow([went_on("a", "s", 0.25), went_on("c", "t")])
    assert backup(cut, last_value=0.5) == 0.75


def test_b5_6_a_mean_weighs_every_play_out_once_and_not_every_leaf():
    root = StateNode("start")
    for _ in range(3):
        backup(root.grow([went_on("a", "s"), ended("x", 0.0)]))
    backup(root.grow([went_on("a", "s"), ended("y", 1.0)]))
    assert root.add(Action("a"), draws=0).mean == 0.25  # the mean over the two leaves would be 0.5


def test_executing_an_action_again_may_lead_elsewhere_and_outcomes_stay_apart():
    root = StateNode("start")
    for state in ("heads", "tails", "heads"):
        backup(root.grow([went_on("flip", state)]))
    (flip,) = root.actions.values()
    assert [outcome.node.state for outcome in flip.outcomes.values()] == ["heads", "tails"]
    assert [outcome.count for outcome in flip.outcomes.values()] == [2, 1]
    drawn = [flip.draw_outcome(Random(seed)).node.state for seed in range(300)]
    assert drawn.count("heads") == pytest.approx(200, abs=35)


def test_the_policy_draws_until_a_state_has_its_draws_then_every_action_is_tried():
    root = StateNode("start")
    assert descend(root, draws=2, random=Random(0)) == Leaf([], root, None)
    root.add(Action("a"))
    root.add(Action("a"))
    leaf = descend(root, draws=2, random=Random(0))
    assert (leaf.node, leaf.action.action.text) == (root, "a")


def test_actions_are_executed_again_as_their_visits_grow_unless_steps_have_no_luck():
    def executions(widening):
        root, count = StateNode("start"), 0

        def play(state, action):
            nonlocal count
            if state == "start":
                count += 1
                return [went_on("a", "s"), ended("x", 1.0)]
            return [ended("x", 1.0)]

        for index in range(100):
            simulate(root, play, draws=1, widening=widening, random=Random(index))
        assert root.visits == 100
        return count

    assert executions(0.5) == 10
    assert executions(0.0) == 1


def test_an_end_inside_the_tree_is_counted_without_playing():
    root = StateNode("start")
    backup(root.grow([ended("a", 1.0)]))
    leaf = descend(root, draws=1, random=Random(0), widening=0.0)
    assert (leaf.node, leaf.path) == (None, [(root.actions[action_key(Action("a"))], 1.0)])
    assert backup(leaf.path) == 1.0
    assert root.visits == 2


def test_a_chosen_action_is_no_draw_of_the_policy():
    root = StateNode("start")
    root.add(Action("a"))
    root.grow([went_on("a", "s"), ended("b", 1.0)], first_is_drawn=False)
    (a,) = root.actions.values()
    (outcome,) = a.outcomes.values()
    assert (root.draws, outcome.node.draws) == (1, 1)


def test_search_finds_the_better_of_two_actions_two_steps_ahead():
    """The policy is careless everywhere: going left pays only if going left again."""

    def play(state, action):
        rng, steps = Random(len(asked)), list[Played[str]]()
        asked.append(state)
        while True:
            text = action.text if action else rng.choice(("left", "right"))
            action = None
            if state != "start":
                return [*steps, ended(text, 1.0 if (state, text) == ("left", "left") else 0.3)]
            steps.append(went_on(text, text))
            state = text

    asked = list[str]()
    root = StateNode("start")
    for index in range(200):
        simulate(root, play, draws=4, random=Random(index), exploration=0.5)
    left = root.actions[action_key(Action("left"))]
    assert root.best() is left
    assert left.mean > 0.8  # of the policy alone: 0.65
    assert len(asked) < 200  # ends within the tree cost nothing


def test_nodes_say_what_they_are():
    root = StateNode("start")
    backup(root.grow([ended("a", 1.0)]))
    assert repr(root) == "<StateNode 1 actions, 1 draws, 1 visits>"
    assert repr(next(iter(root.actions.values()))) == "<ActionNode 'a', 1 visits, mean 1.000>"


def test_what_is_no_number_spoils_no_mean():
    root = StateNode("start")
    path = root.grow([went_on("a", "there"), ended("b", math.nan)])
    for bad in (lambda: backup(path), lambda: backup(path[:1], last_value=math.inf)):
        with pytest.raises(ValueError, match="returns must be finite"):
            bad()
    assert [action.visits for action, _ in path] == [0, 0]


def test_a_search_that_draws_nothing_is_refused():
    with pytest.raises(ValueError, match="draws must be 1 or more: got 0"):
        descend(StateNode("start"), draws=0, random=Random(1))
