"""The one choice that asynchronous training cannot do without: what is done about data of another policy."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from turngate.learners.filters import Filter
from turngate.learners.offpolicy import Correction
from turngate.runtime.errors import ConfigError

__all__ = ["OffPolicy", "OffPolicyName", "ProximalSource", "require_off_policy_choice"]

OffPolicyName: TypeAlias = Literal["decoupled", "bypass", "reinforce", "none"]
"""Shorthands for `OffPolicy.decoupled()` and so on."""
ProximalSource: TypeAlias = Literal["recomputed", "interpolated"]
"""`recomputed`: the log-probs under the weights at the start of the update. `interpolated`: between sampler and current
policy, by lag; fresh tokens and those of lag 1 are then clipped around the sampler (A-3PO, 2512.06547)."""

_OPTIONS = """\
  "decoupled"  clip around the policy at the start of the update, weigh it over the sampler (weights truncated at 2).
               The usual choice for stale data; OffPolicy.decoupled(...) has corrections, filters, interpolation.
  "bypass"     clip around the sampler itself, no weights. Cheap; tokens of large lag fall outside the clip and stop
               training, so for a lag of 1 or 2.
  "reinforce"  no clip, weigh current over sampler (truncated at 2). For one step per batch.
  "none"       no correction at all, as if the data were fresh. Only to measure what correcting is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """What is done about data that another policy sampled: exactly one correction for each gap between policies.

    Made by `decoupled()`, `bypass()`, `reinforce()` or `none()`.
    """

    kind: OffPolicyName
    """`decoupled`: clip around the proximal policy, weigh it over the sampler (AReaL, 2505.24298). `bypass`: clip
    around the sampler itself. `reinforce`: no clip, weigh current over sampler. `none`: plain REINFORCE, -A * logprob,
    without weight, ratio or clip, as if the data were on-policy and this the only step on it."""
    correction: Correction | None = None
    """Weights of `decoupled` and `reinforce`. None stands for truncation at 2 on the level of the surrogate: tokens, or
    its units. `Correction(lower=1.0, upper=1.0)` makes all weights 1 and leaves ratio and clip."""
    proximal: ProximalSource = "recomputed"
    """Where the proximal policy of `decoupled` comes from."""
    filters: tuple[Filter, ...] = ()
    """What is left out of the numerator of the policy loss, judged once per optimizer step by the log-probs at the
    start of the update: `GeometricFilter`, `M2PO`, `OPSM`. A token must pass all of them."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(OffPolicyName):
            raise ConfigError(f"off_policy must be decoupled, bypass, reinforce or none: got {self.kind!r}")
        if self.kind in ("bypass", "none") and self.correction is not None:
            raise ConfigError(
                f"correction must be None with off_policy={self.kind!r}: the ratio already holds it, and applied "
                "twice it biases every token; use off_policy='decoupled'"
            )
        if self.proximal not in get_args(ProximalSource):
            raise ConfigError(f"proximal must be recomputed or interpolated: got {self.proximal!r}")
        if self.proximal == "interpolated" and self.kind != "decoupled":
            raise ConfigError(f"proximal must be recomputed with off_policy={self.kind!r}: nothing else reads it")
        if self.kind == "none" and self.filters:
            raise ConfigError("filters must be empty with off_policy='none': use 'reinforce' to correct anything")
        if self.weighs_in_passes and self.correction is not None and self.correction.normalise:
            raise ConfigError(
                f"correction must not be normalised with off_policy={self.kind!r}, proximal={self.proximal!r}: its "
                "weights follow the current policy, and their mean over the step is unknown inside a forward pass"
            )

    @classmethod
    def decoupled(
        cls,
        correction: Correction | None = None,
        *,
        proximal: ProximalSource = "recomputed",
        filters: tuple[Filter, ...] = (),
    ) -> "OffPolicy":
        """Clip around the proximal policy, weigh it over the sampler. The usual choice for stale data."""
        return cls(kind="decoupled", correction=correction, proximal=proximal, filters=filters)

    @classmethod
    def bypass(cls, *, filters: tuple[Filter, ...] = ()) -> "OffPolicy":
        """Clip around the sampler itself: the ratio is the correction."""
        return cls(kind="bypass", filters=filters)

    @classmethod
    def reinforce(cls, correction: Correction | None = None, *, filters: tuple[Filter, ...] = ()) -> "OffPolicy":
        """No clip; weigh the current policy over the sampler."""
        return cls(kind="reinforce", correction=correction, filters=filters)

    @classmethod
    def none(cls) -> "OffPolicy":
        """Correct nothing: plain REINFORCE."""
        return cls(kind="none")

    @property
    def weighs_in_passes(self) -> bool:
        """True when the weights depend on the current policy, so that they are only known inside a forward pass."""
        return self.kind == "reinforce" or self.proximal == "interpolated"


def require_off_policy_choice(off_policy: OffPolicy | OffPolicyName | None, max_staleness: int) -> None:
    """Raise ConfigError when stale data may come and nobody said what to do about it; the message has the options."""
    if off_policy is None and max_staleness > 0:
        raise ConfigError(
            "off_policy must be chosen for asynchronous training: expected one of the options below, got None with a "
            f"staleness of up to {max_staleness}; set it on the learner, or train synchronously with max_staleness=0\n"
            f"{_OPTIONS}"
        )
