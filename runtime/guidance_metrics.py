"""What guidance did in a batch of episodes, as numbers for its row of metrics; from the records alone."""

import math
from collections import Counter
from collections.abc import Sequence

from turngate.runtime.guidance_tally import decision_kl
from turngate.runtime.types import Decision, GuidedTokens, Trajectory

__all__ = ["guidance_row"]


def guidance_row(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the numbers of a batch; none when nothing in it was guided.

    `guidance_share` is the share of turns that values chose, `guidance_fallback_REASON` of decisions that the base
    made although values were to be asked. Means of `guidance_distinct`, `guidance_kl` and `guidance_beta` are over
    decisions that values chose, NaN without any; `guidance_value_s` is the time spent on values, added up.
    `guidance_token_share` is the share of tokens that the server guided, `guidance_token_kl` the mean of guided less
    base log-prob over them: an estimate of KL per token.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    decisions = [turn.decision for turn in turns if turn.decision is not None]
    row = _decision_row(decisions, len(turns)) if decisions else {}
    guided = [
        (turn.guided_tokens, _logprob_of(trajectory, turn.index), turn.length)
        for trajectory in trajectories
        for turn in trajectory.turns
        if turn.guided_tokens is not None
    ]
    return row | (_token_row(guided, sum(turn.length for turn in turns)) if guided else {})


def _decision_row(decisions: Sequence[Decision], turns: int) -> dict[str, float]:
    chosen = [decision for decision in decisions if not decision.fallback]
    reasons = Counter(decision.reason.replace(" ", "_") for decision in decisions if decision.fallback)
    versions = [decision.value_version for decision in chosen]
    return {
        "guidance_decisions": float(len(decisions)),
        "guidance_share": len(chosen) / turns,
        "guidance_distinct": _mean([float(decision.distinct) for decision in chosen]),
        "guidance_draws": _mean([float(len(decision.candidates)) for decision in decisions]),
        "guidance_kl": _mean([decision_kl(decision) for decision in chosen]),
        "guidance_beta": _mean([decision.beta_used for decision in chosen]),
        "guidance_value_s": math.fsum(decision.seconds for decision in decisions),
        "guidance_value_version_min": float(min(versions, default=0)),
        "guidance_value_version_max": float(max(versions, default=0)),
        **{f"guidance_fallback_{reason}": count / len(decisions) for reason, count in sorted(reasons.items())},
    }


def _token_row(guided: Sequence[tuple[GuidedTokens, float, int]], tokens: int) -> dict[str, float]:
    count = sum(length for _, _, length in guided)
    gained = math.fsum(logprob - math.fsum(one.base_values()) for one, logprob, _ in guided)
    return {
        "guidance_token_share": count / max(tokens, 1),
        "guidance_token_kl": gained / count if count else math.nan,
        "guidance_token_beta": _mean([one.beta for one, _, _ in guided]),
    }


def _logprob_of(trajectory: Trajectory, index: int) -> float:
    turn = trajectory.turns[index]
    values = trajectory.segments[turn.segment].logprob_values()
    return math.fsum(values[turn.start : turn.start + turn.length])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
