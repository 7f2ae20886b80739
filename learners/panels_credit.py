"""Where the credit of a batch went, as named numbers: by turn, on mistakes and on their repair. Pure functions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from turngate.envs.detectors import repeated_actions
from turngate.learners.batch import TokenBatch
from turngate.learners.episode_credit import EpisodeCredit
from turngate.learners.panels_batch import PanelInput
from turngate.learners.ratios import check_shapes
from turngate.learners.recovery import value_recovery_metrics
from turngate.learners.reward_scheme import observed_actions
from turngate.learners.value_metrics import token_turn_gap
from turngate.runtime.types import Trajectory

__all__ = ["TURN_KINDS", "credit_panel", "sign_agreement", "turn_gap_panel", "turn_kinds", "valued_turns_panel"]

TURN_KINDS = ("invalid", "repeated", "recovery")
"""Invalid by the environment's word; done before after the same observation; a valid turn right after a mistake."""
_TURNS = 8


def credit_panel(data: PanelInput) -> dict[str, float]:
    """Return the advantages over policy tokens, by turn index over turns, and their share by kind of turn.

    A turn's advantage is the mean over its policy tokens. `advantage_turn_<t>` is a mean over `advantage_turns_at_<t>`
    turns. `advantage_share_<kind>` is of the sum of |A| over policy tokens, `tokens_share_<kind>` of the policy tokens:
    where the first is larger, credit looks harder there than elsewhere.
    """
    tokens, mask_N = data.tokens, data.tokens.mask_N
    advantages_P = data.advantages_N[mask_N].to(torch.float64)
    if not len(advantages_P):
        return {}
    size_P = advantages_P.abs()
    metrics = {
        "advantage_mean": float(advantages_P.mean()),
        "advantage_std": float(advantages_P.std(correction=0)),
        "advantage_abs_mean": float(size_P.mean()),
        "advantage_abs_max": float(size_P.max()),
        "advantage_zero_fraction": float((advantages_P == 0).to(torch.float64).mean()),
    }
    turns_P = tokens.turn_ids_N[mask_N]
    trajectories_P = tokens.trajectory_ids_N[mask_N]
    metrics |= _by_turn(advantages_P, trajectories_P, turns_P)
    kinds_KIT = _kinds(data.trajectories, data.tokens)
    total = float(size_P.sum())
    for kind, of_IT in zip(TURN_KINDS, kinds_KIT, strict=True):
        chosen_P = of_IT[trajectories_P, turns_P]
        metrics[f"tokens_share_{kind}"] = float(chosen_P.to(torch.float64).mean())
        if total:
            metrics[f"advantage_share_{kind}"] = float(size_P[chosen_P].sum()) / total
    return metrics


def turn_kinds(trajectory: Trajectory) -> tuple[list[bool], list[bool], list[bool]]:
    """Return for each recorded turn whether it is invalid, repeated, or a recovery; injected turns are none of these.

    A recovery is a valid turn of the policy right after one that was invalid, or that something else chose.
    """
    turns = trajectory.turns
    repeated = repeated_actions(observed_actions(trajectory))
    is_mistake = [not turn.valid or turn.injected for turn in turns]
    after = [False, *is_mistake[:-1]]
    return (
        [not turn.valid and not turn.injected for turn in turns],
        [again and not turn.injected for again, turn in zip(repeated, turns, strict=True)],
        [before and not mistake for before, mistake in zip(after, is_mistake, strict=True)],
    )


def sign_agreement(advantages: Tensor, reference: Tensor) -> float | None:
    """Return the fraction of pairs of one sign, over those in which neither is 0; None when there are none."""
    check_shapes(advantages=advantages, reference=reference)
    product = advantages.detach().to(torch.float64).sign() * reference.detach().to(torch.float64).sign()
    counted = product != 0
    return float((product[counted] > 0).to(torch.float64).mean()) if bool(counted.any()) else None


def valued_turns_panel(
    trajectories: Sequence[Trajectory],
    turns: Sequence[Sequence[int]],
    values: Sequence[Tensor],
    returns: Sequence[Tensor],
    advantages: Sequence[Tensor],
    *,
    tau: float,
) -> dict[str, float]:
    """Return what a critic says about turns of terminal episodes against what came of them.

    `advantage_sign_agreement` is between the advantages in use and return minus value, over the turns in which neither
    is 0. Recovery by value is as in `value_recovery_metrics`; rates over nothing are left out.
    Args: turns: per trajectory the ids of the policy's turns; the tensors hold one number for each of these.
    """
    if not trajectories:
        return {}
    metrics: dict[str, float] = {}
    agreement = sign_agreement(torch.cat(list(advantages)), torch.cat(list(returns)) - torch.cat(list(values)))
    if agreement is not None:
        metrics["advantage_sign_agreement"] = agreement
    known = [dict(zip(t, v.tolist(), strict=True)) for t, v in zip(turns, values, strict=True)]
    per_turn = [[of.get(turn.index) for turn in t.turns] for t, of in zip(trajectories, known, strict=True)]
    # A learner may leave the outcome out of its rewards; only then can it be unknown here.
    ended = [(t, v) for t, v in zip(trajectories, per_turn, strict=True) if math.isfinite(t.outcome)]
    found = value_recovery_metrics([t for t, _ in ended], [v for _, v in ended], tau=tau)
    return metrics | {name: value for name, value in found.items() if value == value}


def turn_gap_panel(credits: Sequence[EpisodeCredit]) -> dict[str, float]:
    """Return `token_turn_gap`, the largest distance between Q of an action's last token and Q of the action."""
    if not credits:
        return {}
    last_tokens = torch.stack([targets[-1] for credit in credits for targets in credit.targets])
    gap = token_turn_gap(last_tokens, torch.cat([credit.action_targets_T for credit in credits]))
    return {} if gap is None else {"token_turn_gap": gap}


def _by_turn(advantages_P: Tensor, trajectories_P: Tensor, turns_P: Tensor) -> dict[str, float]:
    """Return the mean advantage of turns by their index."""
    width = int(turns_P.max()) + 1
    keys_U, which_P = (trajectories_P * width + turns_P).unique(return_inverse=True)
    sums_U = torch.zeros(len(keys_U), dtype=torch.float64).index_add(0, which_P, advantages_P)
    means_U = sums_U / torch.bincount(which_P, minlength=len(keys_U))
    metrics: dict[str, float] = {}
    for t in range(min(width, _TURNS)):
        at_U = keys_U % width == t
        if bool(at_U.any()):
            metrics[f"advantage_turn_{t}"] = float(means_U[at_U].mean())
            metrics[f"advantage_turns_at_{t}"] = float(at_U.sum())
    return metrics


def _kinds(trajectories: Sequence[Trajectory], tokens: TokenBatch) -> Tensor:
    """Return bool (kinds, trajectories, turn ids) of the trajectories that train."""
    width = max((turn.index for t in trajectories for turn in t.turns), default=0) + 1
    kinds_KIT = torch.zeros(len(TURN_KINDS), len(trajectories), width, dtype=torch.bool)
    for number in sorted(set(tokens.row_trajectories)):
        turns = trajectories[number].turns
        if turns:
            at = torch.tensor([turn.index for turn in turns])
            kinds_KIT[:, number, at] = torch.tensor(turn_kinds(trajectories[number]))
    return kinds_KIT
