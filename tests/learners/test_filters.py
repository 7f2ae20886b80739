"""Trust-region filters: what they drop, and that they see the whole optimizer step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from turngate.learners.filters import M2PO, OPSM, GeometricFilter, geometric_keep, opsm_keep, second_moment_keep
from turngate.runtime.errors import ConfigError


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def everything(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def test_second_moment_filter_drops_the_largest_until_the_mean_is_small() -> None:
    d = row(0.1, -0.5, 0.2, 0.0)
    assert second_moment_keep(d, everything(d), threshold=0.02)[0].tolist() == [True, False, True, True]


def test_b2_11_second_moment_filter_selects_over_the_whole_step() -> None:
    d = row(0.1, 0.3, 0.25, 0.25)
    whole = second_moment_keep(d, everything(d), threshold=0.05)
    halves = [second_moment_keep(part, everything(part), threshold=0.05) for part in (d[:, :2], d[:, 2:])]
    assert whole[0].tolist() != torch.cat(halves, dim=1)[0].tolist()


def test_opsm_drops_bad_trajectories_that_the_policy_has_left() -> None:
    behaviour, logp = torch.full((3, 2), -1.0), torch.tensor([[-2.0, -2.0], [-2.0, -2.0], [-1.0, -1.0]])
    advantages = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    units = torch.arange(3).unsqueeze(1).expand(3, 2)
    kept = opsm_keep(logp, behaviour, advantages, everything(logp), units, delta=0.5)
    assert kept.all(dim=1).tolist() == [False, True, True]


def test_geometric_filter_drops_whole_trajectories() -> None:
    target, behaviour = torch.tensor([[0.3 - 5, 0.3 - 5], [0.3 - 5, -0.3 - 5]]), torch.full((2, 2), -5.0)
    units = torch.arange(2).unsqueeze(1).expand(2, 2)
    kept = geometric_keep(target, behaviour, everything(target), units, lower=0.9, upper=1.1)
    assert kept.tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GeometricFilter(1.1, 1.2), "bounds must hold ratio 1"),
        (lambda: GeometricFilter(0.9, float("nan")), "bounds must hold ratio 1"),
        (lambda: M2PO(0.0), "threshold must be positive"),
        (lambda: OPSM(-0.1), "delta must be 0 or more"),
    ],
)
def test_filters_that_cannot_work_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
