"""Trees of continuations: values of branching points, credit along the branches, prefixes that leaves share.

A tree is a mapping from each node that was continued to its children; names are the caller's. Every child counts as
one draw of the policy at its parent, however many leaves grew below it.
Sources: Tree-GRPO, Ji et al. 2025 (2509.21240); TreeRL, Hou et al. 2025 (2506.11902); ARPO, Dong et al. 2025
(2507.19849).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from turngate.learners.advantages.group import GroupScheme, group_advantages
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = [
    "Weighting",
    "intra_inter_advantages",
    "leaf_counts",
    "local_global_advantages",
    "shared_prefix_weights",
    "tree_values",
]

Node = TypeVar("Node", bound=Hashable)
Weighting: TypeAlias = Literal["child", "leaf"]
"""A node's value is the mean over its children, or over all leaves below it."""


def tree_values(
    children: Mapping[Node, Sequence[Node]], leaf_returns: Mapping[Node, float], *, weighting: Weighting = "child"
) -> dict[Node, float]:
    """Return the value of every node, children before their parents.

    `child` estimates V of the policy, since children are drawn from it. `leaf` does so only when every branch got the
    same budget: one that was continued more often would count more. It is there to compare with.
    Raises: LearnerError: a leaf without a finite return, a node with two parents, or a cycle.
    """
    if weighting not in ("child", "leaf"):
        raise ConfigError(f"weighting must be child or leaf: got {weighting!r}")
    counts = leaf_counts(children)
    values: dict[Node, float] = {}
    for node, leaves in counts.items():
        below = children.get(node, ())
        if not below:
            values[node] = _leaf_return(node, leaf_returns)
        elif weighting == "child":
            values[node] = math.fsum(values[child] for child in below) / len(below)
        else:
            values[node] = math.fsum(values[child] * counts[child] for child in below) / leaves
    return values


def leaf_counts(children: Mapping[Node, Sequence[Node]]) -> dict[Node, int]:
    """Return the number of leaves below every node, 1 for a leaf itself; children before their parents."""
    inner = [child for below in children.values() for child in below]
    if len(set(inner)) < len(inner):
        twice = next(child for child in inner if inner.count(child) > 1)
        raise LearnerError(f"every node must have one parent: got two for {twice!r}")
    counts: dict[Node, int] = {}
    stack = [(node, False) for node in children if node not in set(inner)]
    while stack:
        node, is_done = stack.pop()
        below = children.get(node, ())
        if below and not is_done:
            stack += [(node, True), *((child, False) for child in below)]
        else:
            counts[node] = sum(counts[child] for child in below) if below else 1
    if lost := [node for node in children if node not in counts]:
        raise LearnerError(f"a tree must have a root: got a cycle through {lost[0]!r}")
    return counts


def local_global_advantages(
    children: Mapping[Node, Sequence[Node]], values: Mapping[Node, float], *, divide_by_sqrt_leaves: bool = False
) -> dict[Node, float]:
    """Return `(V(node) - V(parent)) + (V(node) - V(root))` for every node; 0 for a root.

    Args: values: from `tree_values`. divide_by_sqrt_leaves: as TreeRL, so that nodes many leaves share, which are
    trained on many times there, do not dominate; leave it out where shared tokens are trained once.
    """
    counts = leaf_counts(children)
    advantages: dict[Node, float] = {}
    root_of: dict[Node, Node] = {}
    # Parents come after their children, so backwards they come before.
    for node in reversed(counts):
        root = root_of.setdefault(node, node)
        advantages.setdefault(node, 0.0)
        for child in children.get(node, ()):
            credit = (values[child] - values[node]) + (values[child] - values[root])
            root_of[child] = root
            advantages[child] = credit / math.sqrt(counts[child]) if divide_by_sqrt_leaves else credit
    return advantages


def intra_inter_advantages(scores_N: Tensor, tree_ids: Sequence[Hashable], *, scheme: GroupScheme) -> Tensor:
    """Return, per leaf (N,), its advantage within its tree plus its advantage among all leaves of the task.

    They are added: normalising one of them again leaves only the last, since a z-score takes out what the first put in.
    Args: scores_N: returns of the leaves; NaN marks one that could not be scored. tree_ids: the tree of each leaf.
    """
    if scores_N.shape != (len(tree_ids),):
        raise ShapeError(f"scores must be one per leaf: expected ({len(tree_ids)},), got {tuple(scores_N.shape)}")
    wide_N = scores_N.detach().to(torch.float64)
    advantages_N = group_advantages(wide_N, scheme=scheme).advantages_G
    for tree in dict.fromkeys(tree_ids):
        inside_N = torch.tensor([other == tree for other in tree_ids])
        advantages_N[inside_N] += group_advantages(wide_N[inside_N], scheme=scheme).advantages_G
    return advantages_N.to(scores_N)


def shared_prefix_weights(node_ids_BT: Tensor) -> Tensor:
    """Return a loss weight per token, float32 (B, T), with which every token of the tree is trained once.

    Where each row is a path from the root to a leaf, a node's tokens stand in the row of every leaf below it. Copies
    share the weight 1 equally, so that it does not matter which rows come first or into which micro-batch.
    Args: node_ids_BT: the node each token belongs to, unique over all trees, -1 for context and padding. All rows of a
    tree at once: a micro-batch does not know the others.
    """
    if node_ids_BT.ndim != 2:
        raise ShapeError(f"node ids must be rows of tokens: expected shape (B, T), got {tuple(node_ids_BT.shape)}")
    weights_BT = torch.zeros(node_ids_BT.shape, dtype=torch.float32, device=node_ids_BT.device)
    inside = node_ids_BT >= 0
    nodes, numbers_P = torch.unique(node_ids_BT[inside], return_inverse=True)
    rows_P = inside.nonzero()[:, 0]
    holders = torch.unique(torch.stack([rows_P, numbers_P]), dim=1)[1]
    weights_BT[inside] = (1.0 / torch.bincount(holders, minlength=len(nodes)))[numbers_P]
    return weights_BT


def _leaf_return(node: Node, leaf_returns: Mapping[Node, float]) -> float:
    if node not in leaf_returns or not math.isfinite(leaf_returns[node]):
        raise LearnerError(f"every leaf must have a finite return: got {leaf_returns.get(node)} (node {node!r})")
    return leaf_returns[node]
