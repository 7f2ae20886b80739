"""From records to tensors: token-aligned packed arrays, minibatches of whole trajectories, tightly padded forwards.

    Batch -> TokenBatch (every token once, no padding) -> rows per optimizer step -> MicroBatch per forward

Everything a loss needs lives in flat (N,) arrays over tokens; padding exists only inside the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngate.runtime.engine.packing import Packed, pack
from turngate.runtime.errors import ConfigError, LearnerError, RecordError
from turngate.runtime.types import NO_TURN, NO_VERSION, Batch, Segment, Trajectory

__all__ = ["MicroBatch", "TokenBatch", "check_trajectory", "lay_out", "length_sorted", "microbatches", "minibatches"]

# A behaviour log-prob above 0 is no log-probability; float32 rounding of a near-certain token may reach this.
_LOGPROB_SLACK = 1e-4


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows (segments) laid end to end; index s of every (N,) array belongs to token s."""

    token_ids_N: Tensor
    """int64."""
    mask_N: Tensor
    """bool; True on the tokens that are trained: generated, young enough, of a member that counts."""
    generated_N: Tensor
    """bool; True on all tokens the policy generated, those too old to train on included: values cover them, too."""
    behaviour_logprobs_N: Tensor
    """float32; 0 and never read where the mask is False."""
    versions_N: Tensor
    """int64; NO_VERSION on context."""
    turn_ids_N: Tensor
    """int64; NO_TURN on context."""
    row_ids_N: Tensor
    trajectory_ids_N: Tensor
    group_ids_N: Tensor
    """int64; which row, trajectory and group the token belongs to, counted within the batch."""
    row_lengths: tuple[int, ...]
    """Tokens of each row; they sum to N."""
    row_trajectories: tuple[int, ...]
    """Trajectory of each row."""
    trajectory_names: tuple[str, ...]
    """Ids of all trajectories of the batch, kept or not, for messages; indexed by trajectory_ids_N."""
    base_logprobs_N: Tensor | None = None
    """float32 log-probs of the policy that was sampled from, where values guided the tokens away from it and behaviour
    log-probs are the guided ones; elsewhere the behaviour log-probs. None when no token was guided."""

    @property
    def policy_tokens(self) -> int:
        """Number of trained tokens."""
        return int(self.mask_N.sum())

    @property
    def sampler_logprobs(self) -> Tensor:
        """Log-probs (N,) of the policy that the server held; behaviour log-probs, except where tokens were guided."""
        return self.behaviour_logprobs_N if self.base_logprobs_N is None else self.base_logprobs_N

    @property
    def is_one_row_per_trajectory(self) -> bool:
        """True when no context was ever rewritten."""
        return len(set(self.row_trajectories)) == len(self.row_trajectories)

    def masked(self, mask_N: Tensor) -> "TokenBatch":
        """Return the same tokens with another mask."""
        return replace(self, mask_N=mask_N)

    def sum_by_trajectory(self, values_N: Tensor) -> Tensor:
        """Return the sums (trajectories,) of `values_N` over trained tokens, over all segments, in float64."""
        sums_I = torch.zeros(len(self.trajectory_names), dtype=torch.float64)
        return sums_I.index_add(0, self.trajectory_ids_N[self.mask_N], values_N[self.mask_N].to(torch.float64))

    def row_starts(self) -> NDArray[np.int64]:
        """Return the position of each row's first token, shape (rows,)."""
        return np.cumsum([0, *self.row_lengths], dtype=np.int64)[:-1]

    def rows_mask(self, rows: Sequence[int]) -> Tensor:
        """Return the mask (N,) of the trained tokens of `rows` alone."""
        chosen_R = torch.zeros(len(self.row_lengths), dtype=torch.bool)
        chosen_R[torch.tensor(rows, dtype=torch.int64)] = True
        return self.mask_N & chosen_R[self.row_ids_N]

    def where(self, position: int) -> str:
        """Name the token at `position` of the packed arrays: trajectory, turn, place inside its segment."""
        start = int(self.row_starts()[int(self.row_ids_N[position])])
        name = self.trajectory_names[int(self.trajectory_ids_N[position])]
        return f"trajectory {name}, turn {int(self.turn_ids_N[position])}, token {position - start} of its segment"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass over a few rows of similar length."""

    packed: Packed
    """What the model reads; it scores the P trained tokens."""
    positions_P: Tensor
    """int64; position of the same tokens, in the same order, in the token batch."""


def lay_out(batch: Batch, keep: Sequence[Sequence[bool]], *, vocabulary_size: int) -> TokenBatch:
    """Lay out every segment of the kept trajectories that holds a generated token, one row each.

    Args: keep: per group of the batch and per member. A member that is not kept adds no row, so its tokens are in no
    numerator and no denominator. Tokens older than `batch.min_version` lose their mask.
    Raises: RecordError: a kept trajectory contradicts itself. LearnerError: it lacks token ids or log-probs.
    """
    rows: list[_Row] = []
    names: list[str] = []
    for group_index, group in enumerate(batch.groups):
        for trajectory, is_kept in zip(group.trajectories, keep[group_index], strict=True):
            if is_kept:
                check_trajectory(trajectory)
                place = (len(names), group_index)
                new = (_row(segment, trajectory, batch, vocabulary_size, place) for segment in trajectory.segments)
                rows.extend(row for row in new if row is not None)
            names.append(trajectory.id)
    return _concatenate(rows, tuple(names))


def minibatches(batch: TokenBatch, count: int, generator: torch.Generator) -> list[list[int]]:
    """Deal the rows into at most `count` parts, by whole trajectories in random order.

    All segments of a trajectory land in one part, so that statistics per trajectory stay whole.
    """
    rows_of: dict[int, list[int]] = {}
    for row, trajectory in enumerate(batch.row_trajectories):
        rows_of.setdefault(trajectory, []).append(row)
    order = list(rows_of)
    shuffled = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
    parts = [shuffled[start::count] for start in range(min(count, len(shuffled)))]
    return [[row for trajectory in part for row in rows_of[trajectory]] for part in parts]


def microbatches(
    batch: TokenBatch, rows: Sequence[int], max_tokens: int, *, whole_trajectories: bool = False
) -> Iterator[MicroBatch]:
    """Cut `rows` into forward passes of at most about `max_tokens` tokens, rows of similar length together.

    Every trained token is in exactly one of them; rows without any are left out. A row longer than `max_tokens` gets a
    pass of its own; with `whole_trajectories` so does a trajectory whose rows together are longer.
    """
    starts = batch.row_starts()
    mask_N, token_ids_N = batch.mask_N.numpy(), batch.token_ids_N.numpy()
    has_mask_R = np.zeros(len(batch.row_lengths), dtype=bool)
    has_mask_R[batch.row_ids_N.numpy()[mask_N]] = True
    rows = [row for row in rows if has_mask_R[row]]
    for indices in _passes(batch, rows, max_tokens, whole_trajectories):
        spans = [slice(int(starts[rows[i]]), int(starts[rows[i]]) + batch.row_lengths[rows[i]]) for i in indices]
        masks = [mask_N[span] for span in spans]
        positions = [np.flatnonzero(mask) + span.start for mask, span in zip(masks, spans, strict=True)]
        packed = pack([token_ids_N[span] for span in spans], masks)
        yield MicroBatch(packed, torch.from_numpy(np.concatenate(positions)))


def _passes(batch: TokenBatch, rows: Sequence[int], max_tokens: int, whole_trajectories: bool) -> list[list[int]]:
    """Return which of `rows`, by index, share a forward pass."""
    if not whole_trajectories:
        return length_sorted([batch.row_lengths[row] for row in rows], max_tokens)
    members: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(batch.row_trajectories[row], []).append(index)
    units = list(members.values())
    tokens = [sum(batch.row_lengths[rows[index]] for index in unit) for unit in units]
    return [[index for u in group for index in units[u]] for group in length_sorted(tokens, max_tokens)]


def length_sorted(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group indices of similar length, longest first, so that no group padded to its longest exceeds `max_tokens`."""
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be positive: got {max_tokens}")
    groups: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or (len(groups[-1]) + 1) * width > max_tokens:
            groups.append([])
            width = lengths[index]
        groups[-1].append(index)
    return groups


def check_trajectory(trajectory: Trajectory) -> None:
    """Check what only shows over all segments: each recorded action is in exactly one of them, whole.

    Raises: RecordError: it is not. LearnerError: there is nothing to train on.
    """
    if not trajectory.trainable:
        raise LearnerError(
            f"trajectory {trajectory.id} must be trainable: {trajectory.untrainable_because or 'no reason recorded'}; "
            "training needs token ids and log-probs of the sampled distribution from the endpoint"
        )
    recorded = {turn.index: turn.length for turn in trajectory.turns if turn.length}
    found: dict[int, int] = {}
    for segment in trajectory.segments:
        turns_P = np.frombuffer(segment.turn_ids, np.int32)[np.frombuffer(segment.policy_mask, np.uint8) != 0]
        for turn, count in zip(*np.unique(turns_P, return_counts=True), strict=True):
            found[int(turn)] = found.get(int(turn), 0) + int(count)
    if found != recorded:
        wrong = sorted(t for t in found.keys() | recorded.keys() if found.get(t) != recorded.get(t))
        raise RecordError(
            f"every generated token must be in exactly one segment: expected {[recorded.get(t, 0) for t in wrong]} "
            f"tokens, got {[found.get(t, 0) for t in wrong]} (trajectory {trajectory.id}, turns {wrong})"
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """One segment, cut after its last generated token: nothing behind it can matter to a causal model."""

    token_ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    generated_T: NDArray[np.bool_]
    behaviour_T: NDArray[np.float32]
    versions_T: NDArray[np.int64]
    turn_ids_T: NDArray[np.int64]
    trajectory: int
    group: int
    base_T: NDArray[np.float32] | None
    """Where a turn's tokens were guided: see `TokenBatch.base_logprobs_N`."""


def _row(
    segment: Segment, trajectory: Trajectory, batch: Batch, vocabulary_size: int, place: tuple[int, int]
) -> _Row | None:
    generated_T = np.frombuffer(segment.policy_mask, np.uint8) != 0
    versions_T = np.frombuffer(segment.versions, np.int32).astype(np.int64)
    mask_T = generated_T & (versions_T >= batch.min_version)
    if not generated_T.any():
        return None
    end = int(np.flatnonzero(generated_T)[-1]) + 1
    behaviour_T = np.where(mask_T, np.frombuffer(segment.logprobs, np.float32), np.float32(0))[:end]
    turn_ids_T = np.where(generated_T, np.frombuffer(segment.turn_ids, np.int32), NO_TURN)[:end].astype(np.int64)
    row = _Row(
        token_ids_T=np.frombuffer(segment.token_ids, np.int32)[:end].astype(np.int64),
        mask_T=mask_T[:end],
        generated_T=generated_T[:end],
        behaviour_T=behaviour_T,
        versions_T=np.where(generated_T, versions_T, NO_VERSION)[:end],
        turn_ids_T=turn_ids_T,
        trajectory=place[0],
        group=place[1],
        base_T=_base_logprobs(trajectory, behaviour_T, mask_T[:end], turn_ids_T),
    )
    _check_row(row, trajectory.id, batch.policy_version, vocabulary_size)
    return row


def _base_logprobs(
    trajectory: Trajectory,
    behaviour_T: NDArray[np.float32],
    mask_T: NDArray[np.bool_],
    turn_ids_T: NDArray[np.int64],
) -> NDArray[np.float32] | None:
    """Return the log-probs before guidance of a row's trained tokens; None when none of its turns was guided."""
    base_T: NDArray[np.float32] | None = None
    for turn in trajectory.turns:
        if turn.guided_tokens is None:
            continue
        at_P = np.flatnonzero(turn_ids_T == turn.index)
        if not len(at_P):
            continue  # in another segment
        values_P = np.frombuffer(turn.guided_tokens.base_logprobs, np.float32)
        if len(values_P) != len(at_P):
            raise RecordError(
                f"guided tokens must have one base log-prob each: expected {len(at_P)}, got {len(values_P)} "
                f"(trajectory {trajectory.id}, turn {turn.index})"
            )
        base_T = behaviour_T.copy() if base_T is None else base_T
        base_T[at_P] = np.where(mask_T[at_P], values_P, np.float32(0))
    return base_T


def _check_row(row: _Row, name: str, policy_version: int, vocabulary_size: int) -> None:
    base_T = row.behaviour_T if row.base_T is None else row.base_T
    bad_id_T = (row.token_ids_T < 0) | (row.token_ids_T >= vocabulary_size)
    bad_version_T = row.versions_T > policy_version
    checks: tuple[tuple[str, NDArray[np.bool_], NDArray[Any]], ...] = (
        ("behaviour log-prob must be finite and at most 0", _is_no_logprob(row.behaviour_T), row.behaviour_T),
        ("base log-prob must be finite and at most 0", _is_no_logprob(base_T), base_T),
        (f"token id must be in the vocabulary of {vocabulary_size}", bad_id_T, row.token_ids_T),
        (f"token version must be at most the learner's {policy_version}", bad_version_T, row.versions_T),
        # Position 0 has no prediction: nothing can have generated it.
        ("the first token of a segment must be context", row.generated_T[:1], row.generated_T),
    )
    for what, bad_T, values_T in checks:
        if bad_T.any():
            at = int(np.flatnonzero(bad_T)[0])
            raise RecordError(f"{what}: got {values_T[at]} (trajectory {name}, turn {row.turn_ids_T[at]}, token {at})")


def _is_no_logprob(values_T: NDArray[np.float32]) -> NDArray[np.bool_]:
    return ~(np.isfinite(values_T) & (values_T <= _LOGPROB_SLACK))


def _concatenate(rows: Sequence[_Row], names: tuple[str, ...]) -> TokenBatch:
    lengths = np.asarray([len(row.mask_T) for row in rows], np.int64)

    def tokens(values: Sequence[NDArray[Any]], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate(values) if values else np.empty(0, dtype))

    def spread(values: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.int64), lengths))

    return TokenBatch(
        token_ids_N=tokens([row.token_ids_T for row in rows], np.int64),
        mask_N=tokens([row.mask_T for row in rows], np.bool_),
        generated_N=tokens([row.generated_T for row in rows], np.bool_),
        behaviour_logprobs_N=tokens([row.behaviour_T for row in rows], np.float32),
        versions_N=tokens([row.versions_T for row in rows], np.int64),
        turn_ids_N=tokens([row.turn_ids_T for row in rows], np.int64),
        row_ids_N=spread(range(len(rows))),
        trajectory_ids_N=spread([row.trajectory for row in rows]),
        group_ids_N=spread([row.group for row in rows]),
        row_lengths=tuple(lengths.tolist()),
        row_trajectories=tuple(row.trajectory for row in rows),
        trajectory_names=names,
        base_logprobs_N=None
        if all(row.base_T is None for row in rows)
        else tokens([row.behaviour_T if row.base_T is None else row.base_T for row in rows], np.float32),
    )
