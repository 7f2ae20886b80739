"""Experience of a guided policy, and what leads back from it to the policy that learns.

Two levels, two corrections. An action that was *chosen among draws* (`Turn.decision`) has the base's log-probs in the
record: token ratios are taken against these, and the choice is undone by one weight per turn, 1 / (N w), on all of its
tokens and outside every clip. *Tokens* that were guided (`Turn.guided_tokens`) have the guided log-probs in the record:
token ratios against these are the whole correction.

The weight is exact, for any number of draws N and any finite beta, on the space of (all draws, chosen index). It undoes
the choice of the turn itself: what followed was guided, too, so returns are those of guided behaviour.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turngate.learners.batch import TokenBatch
from turngate.learners.credit import Keep
from turngate.learners.mismatch import effective_sample_size
from turngate.learners.ratios import LOG_RATIO_CLAMP
from turngate.learners.turns import kept_trajectories, turn_tokens
from turngate.runtime.errors import ConfigError, LearnerError, RecordError
from turngate.runtime.guidance import Guidance
from turngate.runtime.guidance_tally import decision_kl
from turngate.runtime.types import Batch, Decision, TokenGuidance, Trajectory, Turn

__all__ = ["GuidedExperience", "check_guidance", "log_selections", "read_guided"]

_log = logging.getLogger("turngate.learner")
_INSTEAD = (
    "use Guidance(floor=0.05) or so, which keeps every draw possible, a finite beta, or a loss without ratios on what "
    "was chosen, such as cloning successful episodes"
)


@dataclass(frozen=True, slots=True)
class GuidedExperience:
    """What guidance did to the turns that train."""

    weights_N: Tensor | None
    """float32; 1 / (N w) of the token's turn, truncated, and 1 where nothing was chosen. None when nothing was."""
    metrics: dict[str, float]


def check_guidance(guidance: Guidance | None, tokens: TokenGuidance | None) -> None:
    """Refuse, before anything runs, guidance that no policy gradient can learn from.

    Raises: ConfigError: actions are chosen greedily.
    """
    # Whatever the KL budget: one that no draws can use up leaves the best of them for certain.
    if guidance is not None and guidance.beta == math.inf and guidance.floor == 0.0:
        raise ConfigError(
            "guidance must leave every draw a chance for a policy gradient to correct for it: got beta=inf without a "
            f"floor; {_INSTEAD}"
        )
    if tokens is not None and tokens.tail == "zero":
        _log.warning(
            "tokens are guided with tail='zero': what they leave out cannot be corrected for, and the gradient is that "
            "of a policy over the candidates alone; tail='base' keeps all tokens possible"
        )


def read_guided(batch: Batch, keep: Keep, tokens: TokenBatch, *, upper: float | None) -> GuidedExperience:
    """Return the weights of the turns that train, and how much guidance there was; no metrics without any.

    Args: upper: where weights are truncated; None leaves them as they are.
    Raises: LearnerError: an action was chosen greedily. RecordError: a log-weight is not finite.
    """
    if not any(_is_guided(turn) for _, t in kept_trajectories(batch, keep) for turn in t.turns):
        return GuidedExperience(None, {})
    found = turn_tokens(tokens)
    weights_N = torch.ones(len(tokens.mask_N))
    decisions: list[Decision] = []
    raw: list[float] = []
    of_tokens: list[tuple[Turn, Tensor]] = []
    for trajectory, turn, at in _trained_turns(batch, keep, found):
        if turn.decision is not None:
            weight = math.exp(min(-_log_selection(turn.decision, trajectory, turn), LOG_RATIO_CLAMP))
            weights_N[at] = weight if upper is None else min(weight, upper)
            decisions.append(turn.decision)
            raw.append(weight)
        if turn.guided_tokens is not None:
            of_tokens.append((turn, at))
    guided = sum(_is_guided(turn) for _, turn, _ in _trained_turns(batch, keep, found))
    metrics = (
        {"guided_turns": float(guided)} | _selection_metrics(decisions, raw, upper) | _token_metrics(tokens, of_tokens)
    )
    metrics["guided_turns_fraction"] = guided / max(sum(map(len, found.values())), 1)
    return GuidedExperience(weights_N if decisions else None, metrics)


def log_selections(trajectory: Trajectory) -> dict[int, float]:
    """Return log(N w) by turn, for turns whose action was chosen; what choosing added to their log-probs.

    Raises: LearnerError, RecordError: as `read_guided`.
    """
    return {
        turn.index: _log_selection(turn.decision, trajectory, turn)
        for turn in trajectory.turns
        if turn.decision is not None
    }


def _is_guided(turn: Turn) -> bool:
    return turn.decision is not None or turn.guided_tokens is not None


def _trained_turns(
    batch: Batch, keep: Keep, found: dict[int, dict[int, Tensor]]
) -> Iterator[tuple[Trajectory, Turn, Tensor]]:
    """Yield every turn with tokens that train, and where these are."""
    for number, trajectory in kept_trajectories(batch, keep):
        of_turns = found.get(number, {})
        for turn in trajectory.turns:
            if turn.index in of_turns:
                yield trajectory, turn, of_turns[turn.index]


def _log_selection(decision: Decision, trajectory: Trajectory, turn: Turn) -> float:
    if decision.fallback:
        return 0.0  # the base acted
    if decision.is_greedy:
        raise LearnerError(
            "a policy gradient must not learn from actions that were chosen greedily: their weights are 0 or 1, and "
            f"what had none cannot be made up for (trajectory {trajectory.id}, turn {turn.index}); {_INSTEAD}"
        )
    if not math.isfinite(decision.log_selection):
        raise RecordError(
            f"log_selection must be finite: got {decision.log_selection} (trajectory {trajectory.id}, turn "
            f"{turn.index})"
        )
    return decision.log_selection


def _selection_metrics(decisions: Sequence[Decision], raw: Sequence[float], upper: float | None) -> dict[str, float]:
    if not decisions:
        return {}
    chosen = [(d, w) for d, w in zip(decisions, raw, strict=True) if not d.fallback]
    metrics = {
        "guided_decisions": float(len(decisions)),
        "guided_fallback_fraction": 1 - len(chosen) / len(decisions),
    }
    if not chosen:
        return metrics
    weights = torch.tensor([w for _, w in chosen], dtype=torch.float64)
    lost = sum(any(c.weight <= 0 for c in d.candidates) for d, _ in chosen)
    return metrics | {
        "guided_weight_mean": float(weights.mean()),
        "guided_weight_max": float(weights.max()),
        "guided_weight_truncated_fraction": 0.0 if upper is None else float((weights > upper).double().mean()),
        "guided_weight_ess_ratio": effective_sample_size(weights.log()).ess_ratio,
        "guided_distinct_mean": sum(d.distinct for d, _ in chosen) / len(chosen),
        "guided_selection_kl": math.fsum(decision_kl(d) for d, _ in chosen) / len(chosen),
        "guided_support_lost_fraction": lost / len(chosen),
    }


def _token_metrics(tokens: TokenBatch, guided: Sequence[tuple[Turn, Tensor]]) -> dict[str, float]:
    if not guided or tokens.base_logprobs_N is None:
        return {}
    at_P = torch.cat([at for _, at in guided])
    gap_P = tokens.behaviour_logprobs_N[at_P].double() - tokens.base_logprobs_N[at_P].double()
    zero = sum(turn.guided_tokens is not None and turn.guided_tokens.tail == "zero" for turn, _ in guided)
    return {
        "guided_token_turns": float(len(guided)),
        "guided_token_kl": float(gap_P.mean()),
        "guided_zero_tail_fraction": zero / len(guided),
    }
