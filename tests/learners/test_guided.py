"""Learning from guided experience: the recorded corrections lead back to the policy's own gradient and solution.

Bandits with enumerable draws: every number is an expectation, computed by the learner's own functions on records.
"""

import copy
import itertools
import logging
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from turngate.envs.base import End, Task
from turngate.learners.batch import TokenBatch, lay_out
from turngate.learners.grpo import GRPO
from turngate.learners.guided import check_guidance, log_selections, read_guided
from turngate.learners.objective import Objective, UpdateData
from turngate.learners.off_policy_choice import OffPolicy
from turngate.learners.offpolicy import Correction
from turngate.learners.parity import measure_parity
from turngate.learners.ppo import PPO
from turngate.learners.replay import ReplayConfig
from turngate.runtime.engine.model import PolicyModel, Scores
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, LearnerError, RecordError
from turngate.runtime.guidance import Guidance
from turngate.runtime.learner import check_learner
from turngate.runtime.selection import log_selection_weight, selection_probs
from turngate.runtime.types import (
    Batch,
    Candidate,
    Decision,
    Group,
    GuidedTokens,
    Sampling,
    Segment,
    TokenGuidance,
    Trajectory,
    Turn,
)

TASK = Task("bandit")
PI = (0.6, 0.3, 0.1)
REWARD = (0.2, 0.5, 1.0)
Q = (0.1, 0.3, 0.9)
BETA = 3.0
EXACT = OffPolicy.reinforce(Correction(upper=None))


def decision(weights: Sequence[float], chosen: int = 0, **fields: Any) -> Decision:
    """Return the record of a choice among draws with these weights."""
    settings = {"log_selection": log_selection_weight(weights, chosen), "beta": BETA, "source": "test"} | fields
    candidates = tuple(Candidate(text=str(i), weight=w) for i, w in enumerate(weights))
    return Decision(candidates=candidates, chosen=chosen, **settings)


def played(name: str, action: int, logprob: float, version: int = 0, **turn: Any) -> Trajectory:
    """Return an episode of one action of one token, behind one token of context."""
    made = Turn(index=0, segment=0, start=1, length=1, text=str(action), rewards={"outcome": REWARD[action]}, **turn)
    segment = Segment.of([0, action], [0, 1], [0.0, logprob], [-1, version], [-1, 0])
    return Trajectory(id=name, task=TASK, turns=(made,), segments=(segment,), end=End.success)


def in_groups(trajectories: Sequence[Trajectory], version: int = 0) -> Batch:
    group = Group(id="g", task=TASK, order=0, trajectories=tuple(trajectories))
    return Batch(groups=(group,), policy_version=version)


def guided_bandit(pi: Sequence[float], count: int = 3) -> tuple[list[Trajectory], Tensor]:
    """Return every way to draw and to choose, as records, and how likely each is under a base policy."""
    trajectories: list[Trajectory] = []
    chances: list[float] = []
    for draws in itertools.product(range(len(pi)), repeat=count):
        weights = selection_probs([Q[a] for a in draws], BETA)
        for chosen, action in enumerate(draws):
            record = decision(weights, chosen)
            trajectories.append(played(f"t{len(chances)}", action, math.log(pi[action]), decision=record))
            chances.append(math.prod(pi[a] for a in draws) * weights[chosen])
    return trajectories, torch.tensor(chances, dtype=torch.float64)


def gradient(
    trajectories: Sequence[Trajectory],
    chances: Tensor,
    logits: Tensor,
    *,
    objective: Objective,
    baseline: float | None = 0.0,
    reference: Sequence[float] = PI,
) -> Tensor:
    """Return the expected gradient of the loss with respect to logits, by the learner's own functions."""
    batch = in_groups(trajectories)
    keep = [[True] * len(trajectories)]
    tokens = lay_out(batch, keep, vocabulary_size=3)
    guided = read_guided(batch, keep, tokens, upper=None)
    mask_N, at_P = tokens.mask_N, tokens.mask_N.nonzero().squeeze(-1)
    actions_P = tokens.token_ids_N[at_P]
    leaf = logits.clone().requires_grad_()
    logprobs_P = leaf.log_softmax(0)[actions_P]
    rewards_P = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    centre = float(chances @ rewards_P) if baseline is None else baseline

    def spread(values_P: Tensor) -> Tensor:
        return torch.zeros(len(mask_N), dtype=torch.float64).masked_scatter(mask_N, values_P.double())

    data = UpdateData(
        tokens,
        advantages_N=spread(rewards_P - centre),
        proximal_N=spread(logprobs_P.detach()),
        reference_N=spread(torch.tensor(reference, dtype=torch.float64).log()[actions_P]),
        is_silent_N=torch.zeros_like(mask_N),
        mode="token_sum",
        turn_weights_N=guided.weights_N,
    )
    importance_N = objective.importance(data, mask_N)
    loss, _ = objective.loss(Scores(logprobs_P, None, None), data, at_P, chances, importance_N[at_P])
    (grad,) = torch.autograd.grad(loss, leaf)
    return grad


def on_policy_gradient(logits: Tensor, *, kl_coef: float = 0.0, baseline: float = 0.0) -> Tensor:
    """Return minus the gradient of E_pi[R] - kl_coef KL(pi || PI), from their definition."""
    leaf = logits.clone().requires_grad_()
    logprobs = leaf.log_softmax(0)
    pi, rewards = logprobs.exp(), torch.tensor(REWARD, dtype=torch.float64)
    value = (pi * (rewards - baseline)).sum() - kl_coef * (pi * (logprobs - torch.tensor(PI).double().log())).sum()
    (grad,) = torch.autograd.grad(-value, leaf)
    return grad


# --- whole actions


@pytest.mark.parametrize("off_policy", [EXACT, "decoupled", "bypass"])
def test_p11_weighted_by_one_over_n_w_the_expected_gradient_is_the_policys_own(off_policy: Any) -> None:
    logits = torch.tensor(PI, dtype=torch.float64).log()
    found = gradient(*guided_bandit(PI), logits, objective=Objective(off_policy=off_policy), baseline=0.3)
    torch.testing.assert_close(found, on_policy_gradient(logits), atol=1e-6, rtol=0)
    off = gradient(*guided_bandit(PI), logits, objective=Objective(off_policy="none"), baseline=0.3)
    assert float((off - on_policy_gradient(logits)).abs().max()) > 0.02


def test_p11_the_choice_and_a_stale_policy_are_corrected_for_side_by_side() -> None:
    logits = torch.tensor([0.3, -0.4, 0.2], dtype=torch.float64)
    found = gradient(*guided_bandit(PI), logits, objective=Objective(off_policy=EXACT))
    torch.testing.assert_close(found, on_policy_gradient(logits), atol=1e-6, rtol=0)


def test_every_token_of_a_chosen_action_has_its_turns_whole_weight(lab: Any, model: PolicyModel) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = lab.sample_trajectory(model, generator, turns=3)
    chosen = decision([0.5, 0.25, 0.25], 1)
    turns = (plain.turns[0], msgspec.structs.replace(plain.turns[1], decision=chosen), plain.turns[2])
    batch = lab.make_batch([[msgspec.structs.replace(plain, turns=turns)]])
    tokens = lay_out(batch, [[True]], vocabulary_size=24)
    weights_N = read_guided(batch, [[True]], tokens, upper=None).weights_N
    assert weights_N is not None
    of_turn_N = tokens.mask_N & (tokens.turn_ids_N == 1)
    assert int(of_turn_N.sum()) == plain.turns[1].length > 1
    assert weights_N[of_turn_N].tolist() == pytest.approx([4 / 3] * plain.turns[1].length)
    assert (weights_N[~of_turn_N] == 1).all()


def solve(objective: Objective, *, steps: int = 250, rate: float = 3.0) -> Tensor:
    """Return the policy after gradient steps on guided data of the policy as it is, drawn anew for every step."""
    logits = torch.zeros(3, dtype=torch.float64)
    for _ in range(steps):
        pi = logits.softmax(0).tolist()
        logits = logits - rate * gradient(*guided_bandit(pi, 2), logits, objective=objective, baseline=None)
    return logits.softmax(0)


def test_training_on_guided_data_finds_the_on_policy_solution_with_the_correction_and_without_it_does_not() -> None:
    # Near a reference the best policy is known: PI exp(R / kl_coef), renormalised. What gradients balance there depends
    # on how often each action is taken: guidance takes the best one more often, and its cost of leaving PI weighs more.
    kl_coef = 0.2
    best = torch.tensor([p * math.exp(r / kl_coef) for p, r in zip(PI, REWARD, strict=True)])
    best = (best / best.sum()).double()
    terms = {"kl_coef": kl_coef, "kl_in": "loss_k2"}
    corrected = solve(Objective(off_policy="decoupled", **terms))
    torch.testing.assert_close(corrected, best, atol=1e-4, rtol=0)
    uncorrected = solve(Objective(off_policy="none", **terms))
    assert float((uncorrected - best).abs().max()) > 0.2


def test_one_update_of_a_learner_weighs_each_turn_once_and_outside_the_clip(
    lab: Any, folder: Path, model: PolicyModel
) -> None:
    batch = _chosen(lab.sample_batch(model, [[0.0, 1.0, 0.0, 1.0]]))
    found = {
        off_policy: _learner(GRPO, folder, off_policy=off_policy).update(batch).metrics
        for off_policy in ("decoupled", "bypass", "none")
    }
    for off_policy, weighted in (("decoupled", True), ("bypass", True), ("none", False)):
        assert found[off_policy]["grad_norm"] == pytest.approx(_norm(batch, lab.make_model(), weighted), rel=1e-4)
    assert found["decoupled"]["grad_norm"] != pytest.approx(found["none"]["grad_norm"], rel=1e-2)


def _chosen(batch: Batch) -> Batch:
    """Return the batch as if every action had been chosen among three draws, with weights by turn and member."""

    def of(trajectory: Trajectory, number: int) -> Trajectory:
        turns = []
        for turn in trajectory.turns:
            weight = 0.2 + 0.1 * ((turn.index + number) % 4)
            record = decision([weight, 1 - weight - 0.1, 0.1], 0)
            turns.append(msgspec.structs.replace(turn, decision=record))
        return msgspec.structs.replace(trajectory, turns=tuple(turns))

    groups = tuple(
        msgspec.structs.replace(g, trajectories=tuple(of(t, i) for i, t in enumerate(g.trajectories)))
        for g in batch.groups
    )
    return msgspec.structs.replace(batch, groups=groups)


def _learner(kind: type, folder: Path, **options: Any) -> Any:
    learner = kind(folder, **{"epochs": 1, "minibatches": 1, "off_policy": "decoupled"} | options)
    learner.load(None)
    return learner


def _norm(batch: Batch, model: PolicyModel, weighted: bool) -> float:
    """Return the gradient's norm, one trajectory and one turn at a time."""
    losses, count = [], 0
    for group in batch.groups:
        mean = sum(t.reward for t in group.trajectories) / len(group.trajectories)
        for t in group.trajectories:
            logp = model.score(pack([t.segments[0].ids()], [t.segments[0].policy_mask])).logprobs_M
            for turn, part in zip(t.turns, logp.split([turn.length for turn in t.turns]), strict=True):
                assert turn.decision is not None
                weight = math.exp(-turn.decision.log_selection) if weighted else 1.0
                losses.append(-weight * (t.reward - mean) * part.sum())
            count += len(logp)
    (torch.stack(losses).sum() / count).backward()
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))


def test_weights_are_truncated_and_the_share_is_reported(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = _chosen(lab.sample_batch(model, [[0.0, 1.0, 0.0, 1.0]]))
    metrics = _learner(GRPO, folder, guided_weight_max=1.2).update(batch).metrics
    raw = [math.exp(-t.decision.log_selection) for m in batch.groups[0].trajectories for t in m.turns if t.decision]
    assert metrics["guided_weight_max"] == pytest.approx(max(raw))
    assert metrics["guided_weight_mean"] == pytest.approx(sum(raw) / len(raw))
    assert metrics["guided_weight_truncated_fraction"] == pytest.approx(sum(w > 1.2 for w in raw) / len(raw))
    assert 0 < metrics["guided_weight_truncated_fraction"] < 1
    tokens = lay_out(batch, [[True] * 4], vocabulary_size=24)
    weights_N = read_guided(batch, [[True] * 4], tokens, upper=1.2).weights_N
    assert weights_N is not None
    assert float(weights_N.max()) == pytest.approx(1.2)


def test_the_report_tells_how_much_guidance_there_was() -> None:
    even, sharp = decision([0.5, 0.5]), decision([0.8, 0.2])
    failed = decision([1.0, 0.0], log_selection=0.0, fallback="timeout")
    same = msgspec.structs.replace(sharp, candidates=(sharp.candidates[0], sharp.candidates[0]))
    records = [even, sharp, failed, same, None]
    trajectories = [played(f"t{i}", 0, -0.5, decision=record) for i, record in enumerate(records)]
    batch, keep = in_groups(trajectories), [[True] * 5]
    tokens = lay_out(batch, keep, vocabulary_size=3)
    metrics = read_guided(batch, keep, tokens, upper=5.0).metrics
    kl = 0.8 * math.log(1.6) + 0.2 * math.log(0.4)
    assert metrics == pytest.approx(
        {
            "guided_turns": 4, "guided_turns_fraction": 4 / 5, "guided_decisions": 4, "guided_fallback_fraction": 1 / 4,
            "guided_weight_mean": (1 + 2 * 0.625) / 3, "guided_weight_max": 1, "guided_weight_truncated_fraction": 0,
            "guided_weight_ess_ratio": 2.25**2 / (1 + 2 * 0.625**2) / 3, "guided_distinct_mean": 5 / 3,
            "guided_selection_kl": (0 + kl + 1.6 * math.log(1.6)) / 3, "guided_support_lost_fraction": 0,
        }
    )  # fmt: skip


def test_a_fallback_has_weight_one_even_where_choices_are_greedy() -> None:
    record = decision([1.0, 0.0], log_selection=0.0, fallback="timeout", beta=-1.0)
    batch, keep = in_groups([played("t", 0, -0.5, decision=record)]), [[True]]
    guided = read_guided(batch, keep, lay_out(batch, keep, vocabulary_size=3), upper=None)
    assert guided.weights_N is not None
    assert guided.weights_N.tolist() == [1.0, 1.0]


def test_experience_without_guidance_has_neither_weights_nor_metrics(lab: Any, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, [[0.0, 1.0]])
    keep = [[True, True]]
    guided = read_guided(batch, keep, lay_out(batch, keep, vocabulary_size=24), upper=5.0)
    assert (guided.weights_N, guided.metrics) == (None, {})


# --- what is refused


def test_greedy_choices_in_the_data_are_refused_by_name(lab: Any, folder: Path) -> None:
    record = decision([1.0, 0.0], beta=-1.0)
    batch = in_groups([played("greedy", 0, -0.5, decision=record), played("other", 1, -0.5)])
    with pytest.raises(LearnerError, match=r"chosen greedily.*\(trajectory greedy, turn 0\); use Guidance\(floor"):
        _learner(GRPO, folder, parity="report").update(batch)
    floored = msgspec.structs.replace(record, floor=0.1)
    assert log_selections(played("t", 0, -0.5, decision=floored)) == {0: pytest.approx(math.log(2))}


def test_a_log_weight_that_is_no_number_is_refused() -> None:
    batch, keep = in_groups([played("t", 0, -0.5, decision=decision([1.0], log_selection=math.nan))]), [[True]]
    with pytest.raises(RecordError, match="log_selection must be finite: got nan"):
        read_guided(batch, keep, lay_out(batch, keep, vocabulary_size=3), upper=None)


async def _q(point: object, candidates: Sequence[object]) -> list[float]:
    return [0.0] * len(candidates)


@pytest.mark.parametrize("more", [{}, {"max_kl": 1.0}])
def test_greedy_guidance_is_refused_before_anything_runs(tmp_path: Path, more: dict[str, Any]) -> None:
    learner = GRPO(tmp_path, off_policy="decoupled")
    with pytest.raises(ConfigError, match="leave every draw a chance"):
        check_learner(learner, Sampling(), 2, guidance=Guidance(_q, beta=math.inf, **more))
    check_learner(learner, Sampling(), 2, guidance=Guidance(_q, beta=math.inf, floor=0.1, **more))
    check_learner(learner, Sampling(), 2, guidance=Guidance(_q, beta=20.0, **more))


def test_one_ratio_per_trajectory_cannot_have_a_weight_per_turn(lab: Any, folder: Path, model: PolicyModel) -> None:
    options = {"surrogate": "sequence_geo", "clip": (3e-4, 4e-4)}
    with pytest.raises(ConfigError, match="a ratio per trajectory; use 'clip'"):
        check_learner(GRPO(folder, **options), Sampling(), 0, guidance=Guidance(_q, beta=1.0))
    with pytest.raises(LearnerError, match="a ratio per trajectory; use 'clip'"):
        _learner(GRPO, folder, **options).update(_chosen(lab.sample_batch(model, [[0.0, 1.0]])))


def test_guided_tokens_need_a_choice_of_off_policy_even_when_they_are_fresh(folder: Path) -> None:
    sampling = Sampling(guidance=TokenGuidance(beta=1.0))
    with pytest.raises(ConfigError, match="off_policy must be chosen to learn from guided tokens"):
        check_learner(GRPO(folder), sampling, 0)
    with pytest.raises(ConfigError, match="off_policy must be chosen to learn from guided tokens"):
        _learner(GRPO, folder, off_policy=None).update(in_groups([_token("a", 0, -0.7, -0.5), _token("b", 1, -1, -1)]))
    check_learner(GRPO(folder, off_policy="decoupled"), sampling, 0)


def test_a_tail_that_is_left_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "turngate.learner"):
        check_guidance(None, TokenGuidance(beta=1.0))
        assert not caplog.records
        check_guidance(None, TokenGuidance(beta=1.0, tail="zero"))
    assert "tail='zero'" in caplog.text


def test_a_bound_on_weights_below_one_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="guided_weight_max must be at least 1"):
        GRPO(folder, guided_weight_max=0.5)


# --- single tokens


def _token(name: str, action: int, base: float, guided: float, tail: str = "base") -> Trajectory:
    record = GuidedTokens(beta=BETA, top_k=3, tail=tail, value_version=0, base_logprobs=array("f", [base]).tobytes())
    return played(name, action, guided, guided_tokens=record)


def _guided_tokens(pi: Sequence[float]) -> tuple[list[Trajectory], Tensor]:
    scores = torch.tensor([math.log(p) + BETA * q for p, q in zip(pi, Q, strict=True)], dtype=torch.float64)
    guided = scores.softmax(0)
    made = [_token(f"t{a}", a, math.log(pi[a]), float(guided[a].log())) for a in range(3)]
    return made, guided


def test_token_ratios_over_the_guided_log_probs_lead_back_to_the_policy() -> None:
    logits = torch.tensor(PI, dtype=torch.float64).log()
    found = gradient(*_guided_tokens(PI), logits, objective=Objective(off_policy=EXACT))
    torch.testing.assert_close(found, on_policy_gradient(logits), atol=1e-6, rtol=0)
    # Were the base's log-probs logged as behaviour, as if nothing had been guided, it would not.
    trajectories, chances = _guided_tokens(PI)
    wrong = [played(t.id, a, math.log(PI[a])) for a, t in enumerate(trajectories)]
    off = gradient(wrong, chances, logits, objective=Objective(off_policy=EXACT))
    assert float((off - on_policy_gradient(logits)).abs().max()) > 0.02


def _guided_batch(lab: Any, model: PolicyModel, shift: float = 0.3) -> Batch:
    """Return a batch whose log-probs are `shift` above the model's, as guidance would have them, in some turns."""
    batch = lab.sample_batch(model, [[0.0, 1.0, 0.0, 1.0]])
    members = []
    for t in batch.groups[0].trajectories:
        segment, turns = t.segments[0], list(t.turns)
        logprobs = list(segment.logprob_values())
        at = slice(turns[0].start, turns[0].start + turns[0].length)
        base = array("f", logprobs[at]).tobytes()
        logprobs[at] = [min(lp + shift, 0.0) for lp in logprobs[at]]
        record = GuidedTokens(beta=1.0, top_k=4, tail="base", value_version=3, base_logprobs=base)
        turns[0] = msgspec.structs.replace(turns[0], guided_tokens=record)
        plain = (segment.ids(), segment.policy_mask, logprobs, segment.version_values(), segment.turn_values())
        members.append(msgspec.structs.replace(t, turns=tuple(turns), segments=(Segment.of(*plain),)))
    group = msgspec.structs.replace(batch.groups[0], trajectories=tuple(members))
    return msgspec.structs.replace(batch, groups=(group,))


def test_parity_is_measured_by_the_log_probs_before_guidance(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = _guided_batch(lab, model)
    metrics = _learner(GRPO, folder, parity="error", parity_tolerance=1e-4).update(batch).metrics
    assert metrics["parity_max_abs"] < 1e-4
    assert metrics["log_ratio_abs_max"] == pytest.approx(0.3, abs=1e-3)  # ratios are over the guided ones
    assert metrics["log_ratio_abs_fresh"] < 1e-4
    assert metrics["guided_token_turns"] == 4
    assert 0 < metrics["guided_token_kl"] <= 0.3 + 1e-4
    assert metrics["guided_zero_tail_fraction"] == 0
    assert "guided_decisions" not in metrics
    tokens: TokenBatch = lay_out(batch, [[True] * 4], vocabulary_size=24)
    assert measure_parity(tokens, tokens.behaviour_logprobs_N, policy_version=0).max_abs > 0.1  # it does look


def test_base_log_probs_that_do_not_fit_their_turn_are_refused() -> None:
    short = GuidedTokens(beta=BETA, top_k=3, tail="base", value_version=0, base_logprobs=b"")
    batch = in_groups([played("t", 0, -0.5, guided_tokens=short)])
    with pytest.raises(RecordError, match="expected 1, got 0"):
        lay_out(batch, [[True]], vocabulary_size=3)
    above = in_groups([_token("t", 0, 0.7, -0.5)])
    with pytest.raises(RecordError, match=r"base log-prob must be finite and at most 0: got 0\.69"):
        lay_out(above, [[True]], vocabulary_size=3)


# --- critics


def test_replay_counts_the_choice_among_the_ratios_and_calls_no_guided_turn_on_policy(
    lab: Any, folder: Path, model: PolicyModel
) -> None:
    plain = lab.sample_batch(model, [[0.0, 1.0, 0.0, 1.0]])
    found = {}
    for name, batch in (("plain", plain), ("guided", _chosen(plain))):
        learner = _learner(PPO, folder, replay=ReplayConfig(start_after=1, batch_trajectories=4))
        found[name] = learner.update(batch).metrics
        assert learner._replay is not None
        kept = learner._replay.store.sample(1, torch.Generator(), policy_version=0)[0]
        assert all(turn.decision is None or turn.decision.candidates == () for turn in kept.turns)
    assert found["plain"]["replay_target_gae"] == 1
    assert found["guided"]["replay_target_vtrace"] == 1
    assert found["plain"]["replay_ess_turn_ratio"] == pytest.approx(1, abs=1e-4)
    assert found["guided"]["replay_ess_turn_ratio"] < 0.99


# --- the whole loss of a mixed batch, against its definition


def _as_guided(trajectory: Trajectory, number: int, *, chosen: bool, tokens: bool) -> Trajectory:
    """Return the episode as if its turns had been guided: chosen among draws, token by token, both, or neither."""
    columns = []
    for segment in trajectory.segments:
        columns.append([*map(list, (segment.ids(), segment.policy_mask, segment.logprob_values()))])
        columns[-1] += [list(segment.version_values()), list(segment.turn_values())]
    turns = []
    for turn in trajectory.turns:
        at = slice(turn.start, turn.start + turn.length)
        fields: dict[str, Any] = {}
        if tokens:
            logprobs = columns[turn.segment][2]
            fields["guided_tokens"] = GuidedTokens(
                beta=1.0, top_k=4, tail="base", value_version=3, base_logprobs=array("f", logprobs[at]).tobytes()
            )
            shift = 0.4 - 0.3 * ((number + turn.index) % 4)
            logprobs[at] = [min(lp + shift, -0.01) for lp in logprobs[at]]
        if chosen:
            weight = 0.15 + 0.2 * ((turn.index + number) % 4)
            failed = {"log_selection": 0.0, "fallback": "timeout"} if turn.index == 1 else {}
            fields["decision"] = decision([weight, 1 - weight], 0, **failed)
        turns.append(msgspec.structs.replace(turn, **fields))
    segments = tuple(Segment.of(*column) for column in columns)
    return msgspec.structs.replace(trajectory, turns=tuple(turns), segments=segments)


def _mixed(lab: Any, model: PolicyModel, *, order: Sequence[int] = range(8), rewritten: bool = True) -> Batch:
    """Return a batch of two groups in which every kind of guidance stands beside every other."""
    plain = lab.sample_batch(model, [[0.0, 1.0, 0.5, 0.0], [1.0, 0.0, 0.0, 0.25]], drop_early_turns=rewritten)
    groups = []
    for half, group in enumerate(plain.groups):
        members = [_as_guided(t, i, chosen=i in (1, 3), tokens=i in (2, 3)) for i, t in enumerate(group.trajectories)]
        mixed = [members[i % 4] for i in order if i // 4 == half]
        groups.append(msgspec.structs.replace(group, trajectories=tuple(mixed)))
    return msgspec.structs.replace(plain, groups=tuple(groups))


def _gradients(folder: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Tensor]:
    """Return the gradient of one update before it is applied."""
    learner = _learner(GRPO, folder, max_grad_norm=1e9, parity="report", **options)
    state, found = learner._state, dict[str, Tensor]()

    def step(*_: object) -> None:
        found.update({n: p.grad.clone() for n, p in state.model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(state.optimizer, "step", step)
    learner.update(batch)
    return found


def _expected(batch: Batch, model: PolicyModel, proximal: PolicyModel) -> Tensor:
    """Return what an update moves up, by its definition, one turn at a time: constant weights times log pi."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in batch.groups:
        mean = sum(t.reward for t in group.trajectories) / len(group.trajectories)
        for t in group.trajectories:
            per_trajectory, length = torch.zeros((), dtype=torch.float64), 0
            for turn in t.turns:
                segment = t.segments[turn.segment]
                at = slice(turn.start, turn.start + turn.length)
                mask = [0] * len(segment.ids())
                mask[at] = [1] * turn.length
                packed = pack([segment.ids()], [mask])
                behaviour = torch.tensor(segment.logprob_values()[at].tolist(), dtype=torch.float64)
                with torch.no_grad():
                    ratios = (proximal.score(packed).logprobs_M - behaviour).exp().clamp(max=2.0)
                is_chosen = turn.decision is not None and not turn.decision.fallback
                weight = min(math.exp(-turn.decision.log_selection), 5.0) if turn.decision and is_chosen else 1.0
                per_trajectory = (
                    per_trajectory + weight * ((t.reward - mean) * ratios * model.score(packed).logprobs_M).sum()
                )
                length += turn.length
            total, count = total + per_trajectory / length, count + 1
    return total / count


def test_the_gradient_on_a_mixed_batch_is_what_central_differences_of_the_definition_give(
    lab: Any, folder: Path, model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = _mixed(lab, model)
    found = _gradients(folder, batch, monkeypatch)
    proximal, generator, epsilon = copy.deepcopy(model).double(), torch.Generator().manual_seed(0), 1e-5
    for name in found:
        along = torch.randn(found[name].shape, generator=generator, dtype=torch.float64)
        values = []
        for sign in (1, -1):
            moved = copy.deepcopy(proximal)
            with torch.no_grad():
                moved.get_parameter(name).add_(sign * epsilon * along)
                values.append(float(_expected(batch, moved, proximal)))
        slope = (values[0] - values[1]) / (2 * epsilon)
        assert float((found[name].double() * along).sum()) == pytest.approx(-slope, rel=1e-3, abs=1e-5), name


def test_a_mixed_batch_teaches_the_same_however_it_is_ordered_cut_and_padded(
    lab: Any, folder: Path, model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _gradients(folder, _mixed(lab, model), monkeypatch)
    for order, cut in [((3, 1, 0, 2, 6, 7, 5, 4), 8192), (range(8), 1), ((2, 3, 1, 0, 7, 6, 4, 5), 40)]:
        other = _gradients(folder, _mixed(lab, model, order=order), monkeypatch, microbatch_tokens=cut)
        for name in whole:
            torch.testing.assert_close(other[name], whole[name], atol=2e-6, rtol=1e-4)


def test_guided_tokens_too_old_to_train_on_take_their_base_log_probs_along(lab: Any, model: PolicyModel) -> None:
    batch = _mixed(lab, model, rewritten=False)
    segment = batch.groups[0].trajectories[2].segments[0]
    versions = list(segment.version_values())
    start = batch.groups[0].trajectories[2].turns[0].start
    versions[start] = -5  # the first token of a guided turn, the others are young
    old = Segment.of(segment.ids(), segment.policy_mask, segment.logprob_values(), versions, segment.turn_values())
    members = list(batch.groups[0].trajectories)
    members[2] = msgspec.structs.replace(members[2], segments=(old,))
    groups = (msgspec.structs.replace(batch.groups[0], trajectories=tuple(members)), batch.groups[1])
    tokens = lay_out(msgspec.structs.replace(batch, groups=groups), [[True] * 4] * 2, vocabulary_size=24)
    fresh = lay_out(batch, [[True] * 4] * 2, vocabulary_size=24)
    assert tokens.base_logprobs_N is not None
    assert fresh.base_logprobs_N is not None
    gone_N = fresh.mask_N & ~tokens.mask_N
    assert int(gone_N.sum()) == 1
    assert torch.equal(tokens.base_logprobs_N[~gone_N], fresh.base_logprobs_N[~gone_N])
    assert float(tokens.base_logprobs_N[gone_N]) == 0.0


def test_the_smallest_weights_and_the_most_draws_are_truncated_and_never_infinite() -> None:
    tiny = decision([5e-324, 1.0], 0)
    many = decision([1e-9] * 3, 0, log_selection=math.log(10**9 * 1e-9))
    sure = decision([1.0] + [0.0] * 999, 0)
    batch = in_groups([played(f"t{i}", 0, -0.5, decision=record) for i, record in enumerate([tiny, many, sure])])
    keep = [[True] * 3]
    for upper, largest in [(5.0, 5.0), (None, math.exp(20))]:
        tokens = lay_out(batch, keep, vocabulary_size=3)
        guided = read_guided(batch, keep, tokens, upper=upper)
        assert guided.weights_N is not None
        assert guided.weights_N[tokens.mask_N].tolist() == pytest.approx([largest, 1.0, 1e-3], rel=1e-4)
        assert all(math.isfinite(value) for value in guided.metrics.values())
    assert guided.metrics["guided_support_lost_fraction"] == pytest.approx(1 / 3)


# --- what is counted


def test_a_choice_that_was_nearly_impossible_has_a_bounded_weight() -> None:
    batch, keep = in_groups([played("t", 0, -0.5, decision=decision([1.0], log_selection=-1000.0))]), [[True]]
    tokens = lay_out(batch, keep, vocabulary_size=3)
    for upper, most in ((None, math.exp(20.0)), (5.0, 5.0)):
        guided = read_guided(batch, keep, tokens, upper=upper)
        assert guided.weights_N is not None
        assert float(guided.weights_N.max()) == pytest.approx(most)


def test_draws_that_had_no_chance_are_counted_and_turns_are_counted_as_turns(lab: Any, model: PolicyModel) -> None:
    plain = lab.sample_trajectory(model, torch.Generator().manual_seed(0), turns=4)
    records = (decision([0.5, 0.5, 0.0], 1), None, decision([0.25, 0.5, 0.25], 1), None)
    turns = tuple(msgspec.structs.replace(t, decision=d) for t, d in zip(plain.turns, records, strict=True))
    batch = lab.make_batch([[msgspec.structs.replace(plain, turns=turns)]])
    metrics = read_guided(batch, [[True]], lay_out(batch, [[True]], vocabulary_size=24), upper=None).metrics
    assert (metrics["guided_turns"], metrics["guided_turns_fraction"]) == (2.0, 0.5)
    assert metrics["guided_support_lost_fraction"] == 0.5


def test_a_fallback_adds_nothing_to_its_log_probs_and_tokens_alone_need_no_weights() -> None:
    failed = decision([1.0, 0.0], log_selection=0.0, fallback="timeout")
    assert log_selections(played("t", 0, -0.5, decision=failed)) == {0: 0.0}
    batch, keep = in_groups([_token("t", 0, -0.7, -0.5)]), [[True]]
    guided = read_guided(batch, keep, lay_out(batch, keep, vocabulary_size=3), upper=None)
    assert guided.weights_N is None
    assert guided.metrics["guided_token_turns"] == 1.0
