"""Scores for searching a tree of snapshots."""

import math
from collections.abc import Sequence

__all__ = ["uct_scores"]


def uct_scores(totals_A: Sequence[float], visits_A: Sequence[int], *, exploration: float = math.sqrt(2)) -> list[float]:
    """Return mean + c sqrt(ln N / n) of each action of a node, shape (A,); infinity for one never tried.

    Totals are sums of returns: they are divided by visits once, here. Equal actions share one entry, their visits add.
    N is the sum of all visits.
    Source: Kocsis & Szepesvári 2006, "Bandit based Monte-Carlo planning".
    """
    parent = sum(visits_A)
    return [
        total / visits + exploration * math.sqrt(math.log(parent) / visits) if visits else math.inf
        for total, visits in zip(totals_A, visits_A, strict=True)
    ]
