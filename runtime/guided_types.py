"""What guidance leaves in the record: how tokens were tilted, and how an action was chosen among several."""

import math
from array import array
from typing import TYPE_CHECKING, Literal, Protocol, Self

import msgspec

from turngate.envs.base import ToolCall
from turngate.runtime.errors import ConfigError
from turngate.runtime.plain_numbers import make_plain

if TYPE_CHECKING:
    from turngate.runtime.types import Completion

__all__ = ["Candidate", "Decision", "GuidedTokens", "TokenGuidance", "action_key", "written_beta"]


class TokenGuidance(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens drawn from pi(w) exp(beta Q(w)), Q(w) being the value of the prefix with w behind it.

    The server does it: the embedded engine, with a critic.
    """

    beta: float
    """Weight of the values; 0 is the policy itself."""
    top_k: int = 8
    """Candidates whose values are looked up: the likeliest tokens of the policy."""
    tail: Literal["base", "zero"] = "base"
    """`base`: other tokens keep the value of the prefix, and so their support. `zero`: they are left out; what was
    sampled so cannot be corrected for where the policy would have said something else."""

    def __post_init__(self) -> None:
        make_plain(self, floats=("beta",), ints=("top_k",))
        if not (self.beta >= 0 and math.isfinite(self.beta)):
            raise ConfigError(f"beta must be finite and at least 0: got {self.beta} (TokenGuidance)")
        if not self.top_k >= 1:
            raise ConfigError(f"top_k must be 1 or more: got {self.top_k} (TokenGuidance)")
        if self.tail not in ("base", "zero"):
            raise ConfigError(f"tail must be base or zero: got {self.tail!r} (TokenGuidance)")


class GuidedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What guidance did to a turn's tokens; their log-probs in the record are the guided ones."""

    beta: float
    top_k: int
    tail: str
    value_version: int
    """Version of the critic; the oldest, where it was replaced while the turn was sampled."""
    base_logprobs: bytes
    """float32 log-probs under the policy itself, one per token of the turn."""
    value_versions: bytes = b""
    """int32 versions of the critic, one per token of the turn; empty when all are `value_version`."""

    def base_values(self) -> "memoryview[float]":
        """Log-probs under the policy as a view of floats; no copy."""
        return memoryview(self.base_logprobs).cast("f")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One action that a guided policy could have taken."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: bytes = b""
    """int32 ids as sampled."""
    logprobs: bytes = b""
    """float32 log-probs of the draw, one per token."""
    q: float | None = None
    """Its estimated value; None when there is none."""
    weight: float
    """Probability with which it was chosen."""

    @classmethod
    def of(cls, action: "Completion", q: float | None, weight: float) -> Self:
        """Return the record of an action; values that are not finite are none."""
        return cls(
            text=action.text,
            tool_calls=action.tool_calls,
            token_ids=array("i", action.token_ids).tobytes(),
            logprobs=array("f", action.logprobs).tobytes(),
            q=q if q is not None and math.isfinite(q) else None,
            weight=weight,
        )

    @property
    def logprob(self) -> float:
        """Log-prob of drawing the whole action: the sum over its tokens."""
        return math.fsum(memoryview(self.logprobs).cast("f"))


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """How a guided policy chose among draws of the base policy."""

    candidates: tuple[Candidate, ...]
    """All draws in their order, duplicates included; or all actions that were enumerated."""
    chosen: int
    beta: float
    """As used, by `written_beta`: infinity is -1."""
    floor: float = 0.0
    log_selection: float
    """log(N w) of the chosen draw: what choosing added to the log-prob of drawing it. 0 when nothing chose. Of an
    enumerated action: the log of its guided probability, less its log-prob under the base."""
    source: str
    """Name of what gave the values."""
    value_version: int = 0
    fallback: str = ""
    """Why the first draw was taken and not the guided one; empty when guidance worked."""
    seconds: float = 0.0
    """Spent on values."""
    is_enumerated: bool = False
    """Whether the candidates were listed by somebody, and not drawn: weights are softmax(log pi + beta Q) then."""

    @property
    def beta_used(self) -> float:
        """Beta, infinity included."""
        return math.inf if self.beta < 0 else self.beta

    @property
    def reason(self) -> str:
        """The kind of fallback, without what is said of this one."""
        return self.fallback.partition(":")[0]

    @property
    def is_greedy(self) -> bool:
        """Whether the best draw was taken for certain: then no weight leads back to the base policy."""
        return self.beta < 0 and self.floor == 0.0

    @property
    def distinct(self) -> int:
        """Number of different actions among the draws."""
        return len(set(map(action_key, self.candidates)))


def written_beta(beta: float) -> float:
    """Return beta as records have it: JSON has no infinity."""
    return beta if math.isfinite(beta) else -1.0


class Said(Protocol):
    """An action, in any of its forms."""

    @property
    def text(self) -> str: ...

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]: ...


def action_key(action: Said) -> object:
    """Return what equal actions have in common: the text and the calls; ids of calls are the server's whim."""
    return action.text, tuple((call.name, call.arguments) for call in action.tool_calls)
