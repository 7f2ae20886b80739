"""Who joins the batch next: requests wait, those for values in front, and are taken in waves."""

from collections import deque
from typing import NamedTuple

from turngate.runtime.engine.cache import BLOCK
from turngate.runtime.engine.incremental import Span
from turngate.runtime.engine.rows import CachedRows
from turngate.runtime.engine.sequence import LiveSequence
from turngate.runtime.engine.values import Values

__all__ = ["Admission", "Admitted"]

_SHARED_BLOCKS = 2
"""New blocks two requests must share for one to wait for the other: less is cheaper to compute twice."""


class Admitted(NamedTuple):
    """A request that joins, and what is to be run of its prompt."""

    sequence: LiveSequence
    span: Span | None
    """By the policy; None where only the value of a critic is wanted."""
    value_span: Span | None
    """By a critic beside the policy; None where it does not follow."""

    @property
    def new_tokens(self) -> int:
        """Tokens to run, by both."""
        return sum(len(span.ids) for span in (self.span, self.value_span) if span is not None)


class Admission:
    """Requests that wait for a row. State: two queues, for values and for generations."""

    def __init__(self, rows: CachedRows, values: Values) -> None:
        self._rows, self._values = rows, values
        self._for_values: deque[LiveSequence] = deque()
        self._generations: deque[LiveSequence] = deque()

    def __len__(self) -> int:
        return len(self._for_values) + len(self._generations)

    def put(self, sequence: LiveSequence) -> None:
        """Let a sequence wait behind the others of its kind."""
        self._queue_of(sequence).append(sequence)

    def remove(self, sequence: LiveSequence) -> None:
        """Take out a sequence that waits."""
        self._queue_of(sequence).remove(sequence)

    def next_wave(self, free: range, budget: int) -> list[Admitted]:
        """Give free rows to requests that share no new prefix with one another, until `budget` tokens are to be run.

        Their known prefixes are copied into the rows.
        """
        wave: list[Admitted] = []
        deferred: list[LiveSequence] = []
        new_keys: set[int] = set()
        while (queue := self._for_values or self._generations) and len(wave) < len(free) and budget > 0:
            sequence = queue.popleft()
            known = {
                rows: (None, 0) if sequence.request.echo else rows.cache.find(sequence.ids, sequence.keys)
                for rows in self._models_of(sequence)
            }
            lengths = [length for _, length in known.values()]
            if self._rows.cache.max_tokens and _is_worth_waiting(sequence, min(lengths), new_keys):
                deferred.append(sequence)
                continue
            sequence.row, sequence.cached_tokens = free[len(wave)], lengths[0]
            spans = {rows: rows.place(sequence.row, sequence.ids, *found) for rows, found in known.items()}
            value_span = spans.get(self._values.rows) if self._values.has_own_rows else None
            wave.append(Admitted(sequence, spans.get(self._rows), value_span))
            new_keys.update(sequence.keys)
            budget -= wave[-1].new_tokens
        for sequence in reversed(deferred):
            self._queue_of(sequence).appendleft(sequence)
        return wave

    def _queue_of(self, sequence: LiveSequence) -> deque[LiveSequence]:
        """Return where a sequence waits. Values go first: they take one step, and whole decisions wait for them."""
        return self._for_values if sequence.request.value else self._generations

    def _models_of(self, sequence: LiveSequence) -> list[CachedRows]:
        """Return which models run a prompt: the policy, unless only a critic's value is wanted, and the critic."""
        if not (sequence.wants_values and self._values.has_own_rows):
            return [self._rows]
        return [self._values.rows] if sequence.request.value else [self._rows, self._values.rows]


def _is_worth_waiting(sequence: LiveSequence, cached: int, new_keys: set[int]) -> bool:
    """True when another request of this wave is about to compute blocks this one needs too."""
    known = cached // BLOCK
    wanted = min(known + _SHARED_BLOCKS, len(sequence.keys))
    return not sequence.request.echo and wanted > known and sequence.keys[wanted - 1] in new_keys
