"""What a learner knows of a batch when it assigns credit, and what it says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from turngate.learners.batch import TokenBatch
from turngate.learners.critic import ValueTargets
from turngate.runtime.types import Batch

__all__ = ["Credit", "Keep", "Scored"]

Keep: TypeAlias = Sequence[Sequence[bool]]
"""Per group of a batch and per member: whether its tokens belong in the loss."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A batch as the policy sees it before the update; what credit is computed from."""

    batch: Batch
    keep: Keep
    tokens: TokenBatch
    """The tokens that train the policy."""
    proximal_N: Tensor
    """Log-probs under the weights at the start of the update."""
    entropy_N: Tensor
    kl_N: Tensor | None
    """k1 of policy over reference per token, when there is a reference."""


@dataclass(frozen=True, slots=True)
class Credit:
    """How good each trained token was."""

    advantages_N: Tensor
    """float32 over the token batch; 0 where the mask is False."""
    is_silent_N: Tensor
    """bool; tokens of degenerate groups: no advantage, and so no other force either."""
    metrics: dict[str, float]
    values: ValueTargets | None = None
    """What a value head on the policy's trunk learns beside the policy."""
