"""Token weights: what each mode averages over, and that cutting the work up changes nothing."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turngate.learners.aggregation import AGGREGATIONS, Aggregation, aggregate, token_weights
from turngate.runtime.errors import ConfigError

MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool()
TRAJECTORIES = torch.tensor([[0] * 4, [0] * 4, [1] * 4])  # rows 0 and 1 are two segments of one trajectory
TURNS = torch.tensor([[0, 0, -1, 1], [-1, 2, -1, -1], [-1, 0, 0, -1]])
GROUPS = torch.tensor([[0] * 4, [0] * 4, [1] * 4])
IDS = {"turn_ids": TURNS, "trajectory_ids": TRAJECTORIES, "group_ids": GROUPS}


def weights(mode: Aggregation, mask: Tensor = MASK, **ids: object) -> Tensor:
    return token_weights(mask, mode, **(IDS | {"length_constant": 10.0} | ids))


def test_token_mean_weighs_every_token_alike() -> None:
    assert weights("token_mean")[MASK].tolist() == [pytest.approx(1 / 6)] * 6


def test_seq_mean_weighs_every_row_alike() -> None:
    row_sums = weights("seq_mean_token_mean").sum(dim=1)
    assert row_sums.tolist() == [pytest.approx(1 / 3)] * 3


def test_seq_sum_lets_rows_weigh_by_length() -> None:
    assert weights("seq_mean_token_sum")[MASK].tolist() == [pytest.approx(1 / 3)] * 6


def test_seq_sum_norm_divides_by_a_constant_and_never_by_the_padded_width() -> None:
    assert weights("seq_mean_token_sum_norm")[MASK].tolist() == [pytest.approx(1 / 30)] * 6


def test_traj_mean_counts_a_trajectory_once_over_all_its_segments() -> None:
    w = weights("traj_mean")
    assert w[:2].sum().item() == pytest.approx(0.5)
    assert w[1, 1].item() == pytest.approx(1 / 8)  # one of four tokens of one of two trajectories


def test_turn_mean_weighs_every_turn_alike() -> None:
    w = weights("turn_mean")
    assert w[0, :2].sum().item() == pytest.approx(1 / 4)  # turn 0 of trajectory 0
    assert w[2].sum().item() == pytest.approx(1 / 4)  # turn 0 of trajectory 1 is another turn


def test_prompt_mean_weighs_every_group_alike() -> None:
    w = weights("prompt_mean")
    assert w[:2].sum().item() == pytest.approx(0.5)
    assert w[2].sum().item() == pytest.approx(0.5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_tokens_and_rows_weigh_nothing(mode: Aggregation) -> None:
    padded = torch.cat([MASK, torch.zeros(1, 4).bool()])
    ids = {name: torch.cat([value, value[:1] * 0 + 7]) for name, value in IDS.items()}
    w = weights(mode, padded, **ids)
    assert (w[~padded] == 0).all()
    torch.testing.assert_close(w[:3], weights(mode))


@pytest.mark.parametrize("mode", [m for m in AGGREGATIONS if "mean" in m and "sum" not in m])
def test_weights_of_a_mean_sum_to_one(mode: Aggregation) -> None:
    assert weights(mode).sum().item() == pytest.approx(1.0)


def test_empty_rows_count_only_on_request() -> None:
    mask = torch.tensor([[1, 1], [0, 0]]).bool()
    assert token_weights(mask, "seq_mean_token_mean").sum().item() == pytest.approx(1.0)
    assert token_weights(mask, "seq_mean_token_mean", count_empty=True).sum().item() == pytest.approx(0.5)


@given(
    mode=st.sampled_from(AGGREGATIONS),
    flags=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6),
    data=st.data(),
)
def test_p1_rows_padding_packing_and_micro_batches_change_nothing(
    mode: Aggregation, flags: list[list[bool]], data: st.DataObject
) -> None:
    mask, rows = torch.tensor(flags), len(flags)
    column = st.lists(st.integers(0, 2), min_size=rows, max_size=rows)
    trajectories = torch.tensor(data.draw(column)).unsqueeze(1).expand_as(mask)
    ids = {"turn_ids": torch.arange(5).expand_as(mask) // 2, "trajectory_ids": trajectories, "group_ids": trajectories}
    loss = torch.arange(rows * 5, dtype=torch.float64).reshape(rows, 5).sin()
    whole = aggregate(loss, weights(mode, mask, **ids))

    order = torch.tensor(data.draw(st.permutations(range(rows))))
    moved = weights(mode, mask[order], **{k: v[order] for k, v in ids.items()})
    assert aggregate(loss[order], moved).item() == pytest.approx(whole.item())

    def wider(x: Tensor, fill: int) -> Tensor:
        return torch.cat([x, torch.full((rows, 3), fill, dtype=x.dtype)], dim=1)

    padded = weights(mode, wider(mask, 0), **{k: wider(v, 0) for k, v in ids.items()})
    assert aggregate(wider(loss, 99), padded).item() == pytest.approx(whole.item())

    flat_rows = torch.arange(rows).unsqueeze(1).expand_as(mask)[mask]
    packed = weights(
        mode, torch.ones(int(mask.sum())).bool(), row_ids=flat_rows, **{k: v[mask] for k, v in ids.items()}
    )
    assert aggregate(loss[mask], packed).item() == pytest.approx(whole.item())

    w, cut = weights(mode, mask, **ids), data.draw(st.integers(0, rows))
    parts = [aggregate(loss[:cut], w[:cut]), aggregate(loss[cut:], w[cut:])]
    assert sum(p.item() for p in parts) == pytest.approx(whole.item())


def test_b2_4_a_mean_of_micro_batch_means_is_another_number() -> None:
    loss, mask = torch.tensor([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    right = aggregate(loss, token_weights(mask, "token_mean")).item()
    means = [aggregate(loss[r], token_weights(mask[r], "token_mean")).item() for r in ([0], [1])]
    assert right == pytest.approx(7 / 4)
    assert sum(means) / 2 == pytest.approx(5 / 2)


@given(cut=st.integers(1, 5))
def test_p3_splitting_a_trajectory_into_segments_leaves_traj_mean_alone(cut: int) -> None:
    loss, mask = torch.arange(6, dtype=torch.float64).unsqueeze(0), torch.ones(1, 6).bool()
    whole = aggregate(loss, token_weights(mask, "traj_mean", trajectory_ids=torch.zeros(1, 6, dtype=torch.int64)))
    split = torch.zeros(2, 6, dtype=torch.bool)
    split[0, :cut], split[1, cut:] = True, True
    zeros = torch.zeros(2, 6, dtype=torch.int64)
    parts = aggregate(loss.expand(2, 6), token_weights(split, "traj_mean", trajectory_ids=zeros))
    assert parts.item() == pytest.approx(whole.item())


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_to_train_on_gives_zero_not_nan(mode: Aggregation) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    none = torch.zeros(2, 3).bool()
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    w = weights(mode, none, turn_ids=zeros, trajectory_ids=zeros, group_ids=zeros)
    total = aggregate(loss, w)
    assert total.item() == 0.0
    assert torch.autograd.grad(total, loss)[0].tolist() == [[0.0] * 3] * 2


NEEDS: Sequence[tuple[Aggregation, str]] = [
    ("prompt_mean", "group_ids"),
    ("traj_mean", "trajectory_ids"),
    ("turn_mean", "turn_ids"),
]


@pytest.mark.parametrize(("mode", "missing"), NEEDS)
def test_missing_ids_are_named(mode: Aggregation, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        token_weights(MASK, mode, **{k: v for k, v in IDS.items() if k != missing})


def test_the_constant_must_be_given_where_it_is_used() -> None:
    with pytest.raises(ConfigError, match="length_constant"):
        token_weights(MASK, "seq_mean_token_sum_norm")


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="token_mean"):
        weights("token_median")
