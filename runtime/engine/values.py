"""Values of running sequences: what the prefix of each is worth, and what each way to go on would be.

They are read off the policy's own value head, or off a critic beside it. A critic has rows of its own, which hold the
same tokens as the policy's wherever values are wanted.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from turngate.runtime.engine.config import ValueKind
from turngate.runtime.engine.incremental import Span
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.rows import CachedRows
from turngate.runtime.engine.sequence import LiveSequence
from turngate.runtime.errors import ConfigError, PublishError

__all__ = ["Values"]


class Values:
    """Reads values off running sequences. State beside the rows': the value of each row's prefix."""

    def __init__(
        self,
        policy: CachedRows,
        critic: PolicyModel | None,
        *,
        kind: ValueKind | None,
        rows: int,
        max_cached_tokens: int,
        version: int = 0,
    ) -> None:
        """Read values off `critic`, or off the policy's own head when None.

        Args: kind: of what the head puts out; None takes the word of the model's config.
        Raises: ConfigError: the critic has no value head, overflows, or does not fit the policy.
        """
        self.rows = policy if critic is None else CachedRows(_checked(critic, policy), rows, max_cached_tokens)
        self.has_own_rows = critic is not None
        self.version = version
        """Of the critic; a head on the policy's trunk has the policy's."""
        model = self.rows.engine.model
        self.is_available = model.value_head is not None
        if self.is_available:
            _check_overflow(model)
        if kind is not None:
            model.config = msgspec.structs.replace(model.config, value_kind=kind)
        self._kind = model.config.value_kind
        self._prefix = np.zeros(rows, dtype=np.float64)

    def read(self, hidden_M: Tensor) -> Tensor:
        """Return values of prefixes from their final states, float64 on the CPU, shape (M,).

        Raises: FloatingPointError: some are not finite.
        """
        outputs_M = self.rows.engine.value_outputs(hidden_M).double().cpu()
        if not outputs_M.isfinite().all():
            raise FloatingPointError("values must be finite: got NaN or infinity; the critic's weights overflow")
        return outputs_M.sigmoid() if self._kind == "success" else outputs_M

    def remember(self, rows: Sequence[int], hidden_M: Tensor) -> None:
        """Note the values of the prefixes in `rows`, whose last tokens gave these final states."""
        self._prefix[list(rows)] = self.read(hidden_M).numpy()

    def of_prefixes(self, rows: Sequence[int]) -> Tensor:
        """Return the values of the prefixes in `rows`, as they were noted last."""
        return torch.from_numpy(self._prefix[list(rows)])

    def of_continuations(self, rows: Sequence[int], tokens_BK: Tensor, positions_B: Tensor) -> Tensor:
        """Return the value of each row's prefix with each of K tokens behind it, float64, shape (B, K): one pass."""
        engine = self.rows.engine
        device = engine.model.embed.weight.device
        at_B = torch.tensor(rows, device=device)
        hidden_BKD = engine.peek_hidden(at_B, tokens_BK.to(device), positions_B.to(device))
        return self.read(hidden_BKD.flatten(0, 1)).view(tokens_BK.shape)

    def prefill(self, joining: Sequence[tuple[LiveSequence, Span]]) -> None:
        """Run the critic over what is left of the prompts of sequences that join."""
        hidden_BD = self.rows.engine.prefill_hidden([span for _, span in joining])
        self.remember([sequence.row for sequence, _ in joining], hidden_BD)
        for sequence, _ in joining:
            self._make_findable(sequence)

    def decode(self, rows: Sequence[int], tokens_B: Tensor, positions_B: Tensor) -> None:
        """Feed the critic the tokens that the policy is fed, for the rows that want values."""
        at_B = torch.tensor(rows, device=tokens_B.device)
        self.remember(rows, self.rows.engine.decode_hidden(tokens_B, positions_B, at_B))

    def move(self, source: int, target: int, sequence: LiveSequence) -> None:
        """A sequence moves to another row; the policy's rows are moved by their owner. Values are read again."""
        if self.has_own_rows and sequence.wants_values:
            self.rows.move(source, target, len(sequence.ids), sequence.value_entry)

    def renew(self, version: int, running: Sequence[LiveSequence]) -> int:
        """The critic has new weights: run what is running again under them; returns how many tokens that took."""
        self.rows.renew()
        self.version = version
        again = [sequence for sequence in running if sequence.wants_values]
        spans = [self.rows.place(s.row, s.ids[:-1], None, 0) for s in again]
        if spans:
            self.rows.engine.prefill_hidden(spans, needs="none")  # the next step feeds the last tokens, and reads
        for sequence in again:
            self._make_findable(sequence)
        return sum(len(span.ids) for span in spans)

    def _make_findable(self, sequence: LiveSequence) -> None:
        prompt = sequence.ids[: sequence.prompt_length]
        sequence.value_entry = self.rows.make_findable(sequence.row, prompt, sequence.keys)


def _checked(critic: PolicyModel, policy: CachedRows) -> PolicyModel:
    if critic.value_head is None:
        raise ConfigError(
            "a critic must have a value head: this model has none; make one with fit_critic (turngate.learners)"
        )
    own, wanted = critic.config, policy.engine.model.config
    if own.vocab_size != wanted.vocab_size:
        raise ConfigError(
            f"critic and policy must share vocab_size: expected {wanted.vocab_size}, got {own.vocab_size}"
        )
    if own.max_context < wanted.max_context:
        raise ConfigError(
            f"critic's max_context must be at least the policy's: expected {wanted.max_context}, got {own.max_context}"
        )
    return critic.eval().requires_grad_(False)


def _check_overflow(model: PolicyModel) -> None:
    try:
        model.check_overflow(where="at the start")
    except PublishError as error:
        raise ConfigError(str(error)) from error
