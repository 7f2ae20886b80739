"""Trees: values by child, credit along branches, two kinds of group advantage, prefixes trained once."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.advantages.group import GROUP_PRESETS, GroupScheme, group_advantages
from turngate.learners.advantages.trees import (
    intra_inter_advantages,
    leaf_counts,
    local_global_advantages,
    shared_prefix_weights,
    tree_values,
)
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import ConfigError, LearnerError

# One branch was continued three times, the other once.
CHILDREN = {"root": ["a", "b"], "a": ["a1"], "b": ["b1", "b2", "b3"]}
RETURNS = {"a1": 0.0, "b1": 1.0, "b2": 1.0, "b3": 1.0}
Z_SCORE = GroupScheme("mean", "std_sample", eps=0.0)


def real(*values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def trees(draw):
    """(children, leaf returns) of a random tree of turns over integer nodes, 0 its root."""
    parents = [draw(st.integers(0, node)) for node in range(draw(st.integers(0, 12)))]
    children: dict[int, list[int]] = {0: []}
    for node, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(node)
    leaves = [node for node in range(len(parents) + 1) if not children.get(node)]
    return children, {leaf: draw(st.integers(-8, 8)) / 4 for leaf in leaves}


# --- values and credit


def test_every_child_counts_as_one_draw_whatever_budget_it_got() -> None:
    values = tree_values(CHILDREN, RETURNS)
    assert (values["root"], values["a"], values["b"]) == (0.5, 0.0, 1.0)


def test_leaf_weights_overcount_the_branch_that_got_more_budget() -> None:
    assert tree_values(CHILDREN, RETURNS, weighting="leaf")["root"] == 0.75


@given(trees())
def test_values_agree_with_a_recursion(tree) -> None:
    children, returns = tree

    def value(node: int) -> float:
        below = children.get(node)
        return sum(map(value, below)) / len(below) if below else returns[node]

    assert tree_values(children, returns)[0] == pytest.approx(value(0))
    assert tree_values(children, returns, weighting="leaf")[0] == pytest.approx(sum(returns.values()) / len(returns))


@given(trees())
def test_leaves_are_counted_once_from_every_node(tree) -> None:
    children, returns = tree
    counts = leaf_counts(children)
    assert counts[0] == len(returns)
    assert all(counts[leaf] == 1 for leaf in returns)
    assert all(counts[node] == sum(counts[c] for c in below) for node, below in children.items() if below)


def test_credit_is_the_step_from_the_parent_plus_the_way_from_the_root() -> None:
    advantages = local_global_advantages(CHILDREN, tree_values(CHILDREN, RETURNS))
    assert advantages == {"root": 0.0, "a": -1.0, "b": 1.0, "a1": -0.5, "b1": 0.5, "b2": 0.5, "b3": 0.5}


def test_credit_can_be_divided_by_the_root_of_the_leaves() -> None:
    values = tree_values(CHILDREN, RETURNS)
    advantages = local_global_advantages(CHILDREN, values, divide_by_sqrt_leaves=True)
    assert advantages["b"] == pytest.approx(1.0 / math.sqrt(3))
    assert advantages["b1"] == 0.5


def test_several_trees_have_their_own_roots() -> None:
    children, returns = {"r": ["x", "y"], "s": ["z"]}, {"x": 1.0, "y": 0.0, "z": 5.0}
    advantages = local_global_advantages(children, tree_values(children, returns))
    assert advantages == {"r": 0.0, "s": 0.0, "x": 1.0, "y": -1.0, "z": 0.0}


def test_deep_trees_need_no_recursion() -> None:
    chain = {node: [node + 1] for node in range(5000)}
    assert tree_values(chain, {5000: 1.0})[0] == 1.0


@pytest.mark.parametrize(
    ("children", "returns", "message"),
    [
        ({"r": ["a"]}, {}, "finite return.*'a'"),
        ({"r": ["a"]}, {"a": math.nan}, "finite return"),
        ({"r": ["a", "b"], "b": ["a"]}, {"a": 1.0}, "one parent.*'a'"),
        ({"a": ["b"], "b": ["a"]}, {}, "cycle"),
    ],
)
def test_what_is_no_tree_is_refused(children, returns, message: str) -> None:
    with pytest.raises(LearnerError, match=message):
        tree_values(children, returns)


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="weighting"):
        tree_values(CHILDREN, RETURNS, weighting="depth")


# --- advantages within and between trees


def test_advantages_within_and_between_trees_are_added() -> None:
    scores, trees_of = real(1.0, 0.0, 1.0, 1.0), ["p", "p", "q", "q"]
    added = intra_inter_advantages(scores, trees_of, scheme=GROUP_PRESETS["dr_grpo"])
    assert added.tolist() == [0.5 + 0.25, -0.5 - 0.75, 0.0 + 0.25, 0.0 + 0.25]


def test_b1_12_a_z_score_of_a_z_score_keeps_only_the_inner_one() -> None:
    """Tree-GRPO's compute_tree_grpo_outcome_advantage nests them: what the task said about the tree is lost."""
    scores, tree = real(1.0, 0.0, 1.0, 1.0, 0.0, 0.0), torch.tensor([0, 0, 0, 1, 1, 1])

    def within(values):
        return torch.cat([group_advantages(values[tree == t], scheme=Z_SCORE).advantages_G for t in (0, 1)])

    between = group_advantages(scores, scheme=Z_SCORE).advantages_G
    torch.testing.assert_close(within(between), within(scores))
    added = intra_inter_advantages(scores, tree.tolist(), scheme=Z_SCORE)
    torch.testing.assert_close(added, within(scores) + between)
    assert not torch.allclose(added, within(scores))


def test_an_unscorable_leaf_moves_nobody() -> None:
    added = intra_inter_advantages(real(1.0, math.nan, 0.0), ["p"] * 3, scheme=GROUP_PRESETS["dr_grpo"])
    assert added.tolist() == [1.0, 0.0, -1.0]


def test_every_leaf_needs_its_tree() -> None:
    with pytest.raises(ShapeError, match="one per leaf"):
        intra_inter_advantages(real(1.0, 0.0), ["p"], scheme=Z_SCORE)


# --- shared prefixes


def test_shared_tokens_are_trained_once_not_once_per_leaf() -> None:
    weights = shared_prefix_weights(torch.tensor([[-1, 0, 0, 1, -1], [-1, 0, 0, 2, 2], [-1, 5, -1, -1, -1]]))
    assert weights.tolist() == [[0.0, 0.5, 0.5, 1.0, 0.0], [0.0, 0.5, 0.5, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0, 0.0]]


@given(trees())
def test_each_node_of_any_tree_weighs_as_much_as_it_has_tokens(tree) -> None:
    children, returns = tree
    parent = {child: node for node, below in children.items() for child in below}
    rows = []
    for leaf in returns:
        path = [leaf]
        while path[-1] in parent:
            path.append(parent[path[-1]])
        rows.append([node for node in reversed(path) for _ in range(node % 3 + 1)])
    widest = max(map(len, rows))
    ids = torch.tensor([row + [-1] * (widest - len(row)) for row in rows])
    weights = shared_prefix_weights(ids)
    for node in leaf_counts(children):
        assert weights[ids == node].sum().item() == pytest.approx(node % 3 + 1)
    assert torch.equal(shared_prefix_weights(ids.flip(0)), weights.flip(0))


def test_rows_without_nodes_weigh_nothing() -> None:
    assert not shared_prefix_weights(torch.full((2, 3), -1)).any()
    assert shared_prefix_weights(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4)


def test_prefix_weights_need_rows() -> None:
    with pytest.raises(ShapeError, match="rows"):
        shared_prefix_weights(torch.tensor([0, 1]))
