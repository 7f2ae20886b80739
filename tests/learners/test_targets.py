"""Off-policy value targets: against sums written out, and against exact expectations on enumerable decision trees."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.learners.ratios import ShapeError
from turngate.learners.targets import (
    TRACE_KINDS,
    TraceKind,
    TurnSteps,
    q_one_step,
    replay_weights,
    retrace,
    turn_log_ratios,
    vtrace,
    vtrace_batch,
)
from turngate.runtime.errors import ConfigError, LearnerError

F64 = torch.float64
numbers = st.floats(-2, 2, allow_subnormal=False)
turns = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6)
unit = st.floats(0, 1, allow_subnormal=False)


def tensor(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=F64)


def columns(rows: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [tensor(column) for column in zip(*rows, strict=True)]


# --- V-trace against sums written out


@given(turns, numbers, unit, unit, st.floats(0.1, 3), st.floats(0.1, 3))
def test_vtrace_is_the_sum_of_equation_one(
    rows: list[tuple[float, float, float]], bootstrap: float, gamma: float, lam: float, one: float, other: float
) -> None:
    rho_bar, c_bar = max(one, other), min(one, other)
    rewards, values, logs = columns(rows)
    out = vtrace(rewards, values, logs, bootstrap=bootstrap, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar)
    v = [*values.tolist(), bootstrap]
    for s in range(len(rows)):
        total, trace = v[s], 1.0
        for t in range(s, len(rows)):
            ratio = math.exp(rows[t][2])
            total += gamma ** (t - s) * trace * min(rho_bar, ratio) * (rows[t][0] + gamma * v[t + 1] - v[t])
            trace *= lam * min(c_bar, ratio)
        assert out.targets_T[s].item() == pytest.approx(total, abs=1e-9)


@given(turns, numbers, unit, unit)
def test_on_policy_targets_are_lambda_returns_and_advantages_their_errors(
    rows: list[tuple[float, float, float]], bootstrap: float, gamma: float, lam: float
) -> None:
    rewards, values, _ = columns(rows)
    out = vtrace(rewards, values, torch.zeros_like(values), bootstrap=bootstrap, gamma=gamma, lam=lam)
    v, following = [*values.tolist(), bootstrap], bootstrap
    for t in reversed(range(len(rows))):
        following = rows[t][0] + gamma * ((1 - lam) * v[t + 1] + lam * following)
        assert out.targets_T[t].item() == pytest.approx(following, abs=1e-9)
        assert out.pg_advantages_T[t].item() == pytest.approx(following - v[t], abs=1e-9)


def test_impossible_actions_leave_the_values_alone() -> None:
    values = tensor([0.3, 0.7])
    out = vtrace(tensor([5.0, 9.0]), values, tensor([-math.inf, -math.inf]), bootstrap=4.0)
    assert out.targets_T.tolist() == values.tolist()
    assert out.pg_advantages_T.tolist() == [0.0, 0.0]


def test_nothing_follows_a_terminal_end() -> None:
    rewards, values, logs = tensor([0.0, 1.0]), tensor([0.3, 0.5]), tensor([0.1, -0.2])
    ended, zero = (vtrace(rewards, values, logs, bootstrap=b) for b in (None, 0.0))
    assert ended.targets_T.tolist() == zero.targets_T.tolist()
    assert retrace(rewards, values, values, logs, bootstrap=None).targets_T[-1].item() == 1.0


# --- The listed mistakes


def test_b4_1_the_next_trajectory_does_not_leak_into_a_truncated_one() -> None:
    """A shifted flat array of targets gives the last turn the first target of the next one (pytorch/rl#4209 #4210)."""
    quiet, zeros = tensor([0.0, 0.0]), tensor([0.0, 0.0])
    out = vtrace_batch(
        [TurnSteps(quiet, tensor([1.0, 1.0]), zeros, 1.0), TurnSteps(quiet, tensor([100.0, 100.0]), zeros, 100.0)]
    )
    assert [v.targets_T.tolist() for v in out] == [[1.0, 1.0], [100.0, 100.0]]
    assert [v.pg_advantages_T.tolist() for v in out] == [[0.0, 0.0], [0.0, 0.0]]


def test_b4_2_the_last_turn_has_a_target_of_its_own_and_is_not_given_up_as_bootstrap() -> None:
    """RLlib used the last step's value as bootstrap and dropped the step (ray#36013)."""
    out = vtrace(tensor([1.0]), tensor([0.25]), tensor([0.0]), bootstrap=0.5, gamma=0.5)
    assert out.targets_T.tolist() == [1.25]
    assert out.pg_advantages_T.tolist() == [1.0]
    assert len(vtrace(tensor([0.0, 0.0, 1.0]), tensor([0.0] * 3), tensor([0.0] * 3), bootstrap=0.0).targets_T) == 3


def test_b4_3_targets_do_not_depend_on_the_order_of_trajectories_nor_bootstrap_from_themselves() -> None:
    """A scan over resampled rows mixes trajectories, and its last row is its own successor (micdoh/XLRON#50)."""
    steps = [
        TurnSteps(tensor([float(i), 1.0]), tensor([0.1 * i, 0.2]), tensor([0.3, -0.4]), bootstrap=float(i))
        for i in range(4)
    ]
    straight = vtrace_batch(steps, gamma=0.9)
    for order in itertools.permutations(range(4)):
        shuffled = vtrace_batch([steps[i] for i in order], gamma=0.9)
        assert [v.targets_T.tolist() for v in shuffled] == [straight[i].targets_T.tolist() for i in order]
    # The last turn of the last trajectory looks at its bootstrap alone: 0.2 + e^-0.4 (1 + 0.9 * 3 - 0.2).
    assert straight[-1].targets_T[-1].item() == pytest.approx(0.2 + math.exp(-0.4) * (1 + 0.9 * 3 - 0.2))


def test_b4_4_advantages_hold_the_ratio_exactly_once_and_follow_a_recomputation() -> None:
    """PufferLib recomputed advantages, threw them away and applied the ratio again in the loss (PufferLib#306)."""
    rewards, values = tensor([1.0]), tensor([0.2])
    half = vtrace(rewards, values, tensor([math.log(0.5)]), bootstrap=0.0)
    assert half.pg_advantages_T.item() == pytest.approx(0.5 * 0.8)
    assert half.targets_T.item() == pytest.approx(0.2 + 0.5 * 0.8)
    quarter = vtrace(rewards, values, tensor([math.log(0.25)]), bootstrap=0.0)
    assert quarter.pg_advantages_T.item() == pytest.approx(0.25 * 0.8)


# --- P10: exact expectations on decision trees


@dataclass(frozen=True)
class Path:
    """One way through a tree: its probability under the behaviour policy, and one entry per turn."""

    probability: float
    nodes: list[tuple[int, ...]]
    actions: list[int]
    rewards: list[float]
    bootstrap: float


class Tree:
    """Turns with A actions and C chance outcomes each; every node, policy, reward and estimate is random.

    At the end the task is over (bootstrap 0), except where it was cut: there the bootstrap is the exact value.
    """

    def __init__(self, seed: int, gamma: float, *, depth: int = 3, actions: int = 2, outcomes: int = 2) -> None:
        self.random, self.gamma, self.depth = random.Random(seed), gamma, depth
        self.actions, self.outcomes = range(actions), range(outcomes)
        edges = list(itertools.product(self.actions, self.outcomes))
        self.nodes = [
            tuple(itertools.chain.from_iterable(p)) for d in range(depth) for p in itertools.product(edges, repeat=d)
        ]
        self.mu, self.pi = ({h: self.simplex(actions) for h in self.nodes} for _ in range(2))
        self.chance = {(h, a): self.simplex(outcomes) for h in self.nodes for a in self.actions}
        self.reward = {(h, a, o): self.random.uniform(-1, 1) for h in self.nodes for a, o in edges}
        leaves = [(*h, a, o) for h in self.nodes if len(h) == 2 * (depth - 1) for a, o in edges]
        self.end = {h: self.random.choice([0.0, self.random.uniform(-1, 1)]) for h in leaves}
        self.v = {h: self.random.uniform(-1, 1) for h in self.nodes}
        self.q = {(h, a): self.random.uniform(-1, 1) for h in self.nodes for a in self.actions}

    def simplex(self, n: int) -> list[float]:
        weights = [self.random.uniform(0.05, 1) for _ in range(n)]
        return [w / sum(weights) for w in weights]

    def log_ratio(self, h: tuple[int, ...], a: int) -> float:
        return math.log(self.pi[h][a] / self.mu[h][a])

    def exact_values(self, policy: dict[tuple[int, ...], list[float]]) -> dict[tuple[int, ...], float]:
        values = dict(self.end)
        for h in reversed(self.nodes):
            values[h] = sum(policy[h][a] * self.exact_q(values, h, a) for a in self.actions)
        return values

    def exact_q(self, values: dict[tuple[int, ...], float], h: tuple[int, ...], a: int) -> float:
        return sum(
            p * (self.reward[h, a, o] + self.gamma * values[*h, a, o])
            for o, p in zip(self.outcomes, self.chance[h, a], strict=True)
        )

    def truncated_policy(self, rho_bar: float) -> dict[tuple[int, ...], list[float]]:
        """Return the policy proportional to min(rho_bar * mu, pi)."""
        weights = {h: [min(rho_bar * m, p) for m, p in zip(self.mu[h], self.pi[h], strict=True)] for h in self.nodes}
        return {h: [w / sum(ws) for w in ws] for h, ws in weights.items()}

    def paths(self) -> Iterator[Path]:
        for edges in itertools.product(itertools.product(self.actions, self.outcomes), repeat=self.depth):
            h: tuple[int, ...] = ()
            path = Path(1.0, [], [], [], 0.0)
            probability = 1.0
            for a, o in edges:
                path.nodes.append(h)
                path.actions.append(a)
                path.rewards.append(self.reward[h, a, o])
                probability *= self.mu[h][a] * self.chance[h, a][o]
                h = (*h, a, o)
            yield Path(probability, path.nodes, path.actions, path.rewards, self.end[h])

    def expected_vtrace(self, v: dict[tuple[int, ...], float], **options: object) -> dict[tuple[int, ...], float]:
        """Return E[vs_t | h_t] under the behaviour policy, for every node."""
        sums, mass = dict.fromkeys(self.nodes, 0.0), dict.fromkeys(self.nodes, 0.0)
        for path in self.paths():
            values = tensor(v[h] for h in path.nodes)
            logs = tensor(self.log_ratio(h, a) for h, a in zip(path.nodes, path.actions, strict=True))
            out = vtrace(tensor(path.rewards), values, logs, bootstrap=path.bootstrap, gamma=self.gamma, **options)
            for h, target in zip(path.nodes, out.targets_T.tolist(), strict=True):
                sums[h] += path.probability * target
                mass[h] += path.probability
        return {h: sums[h] / mass[h] for h in self.nodes}

    def expected_retrace(
        self, q: dict[tuple[tuple[int, ...], int], float], kind: TraceKind, lam: float
    ) -> dict[tuple[tuple[int, ...], int], float]:
        """Return E[y_t | h_t, a_t] under the behaviour policy, for every node and action."""
        v = {h: sum(self.pi[h][a] * q[h, a] for a in self.actions) for h in self.nodes}
        sums, mass = dict.fromkeys(q, 0.0), dict.fromkeys(q, 0.0)
        for path in self.paths():
            taken = list(zip(path.nodes, path.actions, strict=True))
            out = retrace(
                tensor(path.rewards),
                tensor(q[pair] for pair in taken),
                tensor(v[h] for h in path.nodes),
                tensor(self.log_ratio(*pair) for pair in taken),
                policy_probs_T=tensor(self.pi[h][a] for h, a in taken),
                kind=kind,
                bootstrap=path.bootstrap,
                gamma=self.gamma,
                lam=lam,
            )
            for pair, target in zip(taken, out.targets_T.tolist(), strict=True):
                sums[pair] += path.probability * target
                mass[pair] += path.probability
        return {pair: sums[pair] / mass[pair] for pair in q}


seeds = st.integers(0, 10_000)
few = settings(max_examples=10, deadline=None)


@few
@given(seeds, unit)
def test_p10_unclipped_vtrace_is_unbiased_for_any_values(seed: int, gamma: float) -> None:
    tree = Tree(seed, gamma)
    expected = tree.expected_vtrace(tree.v, rho_bar=None, c_bar=None)
    exact = tree.exact_values(tree.pi)
    assert expected == {h: pytest.approx(exact[h], abs=1e-9) for h in tree.nodes}


@few
@given(seeds, unit, st.floats(0.3, 2), st.floats(0.1, 1), unit)
def test_p10_clipped_vtrace_has_the_truncated_policys_value_as_fixed_point(
    seed: int, gamma: float, rho_bar: float, share: float, lam: float
) -> None:
    tree = Tree(seed, gamma)
    exact = tree.exact_values(tree.truncated_policy(rho_bar))
    expected = tree.expected_vtrace(exact, rho_bar=rho_bar, c_bar=share * rho_bar, lam=lam)
    assert expected == {h: pytest.approx(exact[h], abs=1e-9) for h in tree.nodes}


def test_p10_clipped_vtrace_converges_to_its_fixed_point_and_not_to_the_current_policys_value() -> None:
    tree = Tree(3, 0.9)
    exact, values = tree.exact_values(tree.truncated_policy(1.0)), tree.v
    for _ in range(60):
        values = tree.expected_vtrace(values)
    assert values == {h: pytest.approx(exact[h], abs=1e-6) for h in tree.nodes}
    assert abs(values[()] - tree.exact_values(tree.pi)[()]) > 1e-3


@few
@given(seeds, unit, unit, st.sampled_from(TRACE_KINDS))
def test_p10_every_trace_has_the_current_policys_q_as_fixed_point(
    seed: int, gamma: float, lam: float, kind: TraceKind
) -> None:
    tree = Tree(seed, gamma)
    values = tree.exact_values(tree.pi)
    exact = {(h, a): tree.exact_q(values, h, a) for h in tree.nodes for a in tree.actions}
    expected = tree.expected_retrace(exact, kind, lam)
    assert expected == {pair: pytest.approx(q, abs=1e-9) for pair, q in exact.items()}


@few
@given(seeds, unit)
def test_p10_importance_sampled_q_targets_are_unbiased_for_any_q(seed: int, gamma: float) -> None:
    tree = Tree(seed, gamma)
    values = tree.exact_values(tree.pi)
    expected = tree.expected_retrace(tree.q, "is", 1.0)
    assert expected == {(h, a): pytest.approx(tree.exact_q(values, h, a), abs=1e-9) for h, a in tree.q}


def test_p10_retrace_converges_to_the_current_policys_q() -> None:
    tree = Tree(5, 0.9)
    values, q = tree.exact_values(tree.pi), tree.q
    for _ in range(4):
        q = tree.expected_retrace(q, "retrace", 1.0)
    assert q == {(h, a): pytest.approx(tree.exact_q(values, h, a), abs=1e-9) for h, a in q}


# --- The Retrace family and one-step targets by hand


def test_retrace_truncates_the_trace_of_the_next_turn_and_importance_sampling_does_not() -> None:
    rewards, taken, expected = tensor([0.0, 1.0]), tensor([0.9, 0.4]), tensor([7.0, 0.5])
    logs, probs = tensor([5.0, math.log(2.0)]), tensor([0.1, 0.3])
    # Last target 1; error of the last turn 0.6, believed by 0.5, 2, 0.15 and 0.5.
    beliefs = {"retrace": 0.5, "is": 2.0, "tree_backup": 0.15, "q_lambda": 0.5}
    for kind in TRACE_KINDS:
        out = retrace(rewards, taken, expected, logs, kind=kind, policy_probs_T=probs, bootstrap=0.0, lam=0.5)
        assert out.targets_T.tolist() == pytest.approx([0.5 + beliefs[kind] * 0.6, 1.0])


def test_one_step_targets_look_one_turn_ahead() -> None:
    assert q_one_step(tensor([0.5, 1.0]), tensor([0.4, 0.0]), gamma=0.5).tolist() == [0.7, 1.0]


def test_one_step_targets_equal_q_lambda_without_traces() -> None:
    rewards, taken, expected = tensor([0.1, 0.2]), tensor([0.5, 0.6]), tensor([0.7, 0.8])
    without = retrace(rewards, taken, expected, kind="q_lambda", bootstrap=0.3, gamma=0.9, lam=0.0)
    assert without.targets_T.tolist() == q_one_step(rewards, tensor([0.8, 0.3]), gamma=0.9).tolist()


# --- Log-ratios of turns


def test_a_turns_log_ratio_is_the_unclipped_sum_over_its_tokens_in_all_segments() -> None:
    logprobs = torch.tensor([9.0, -1.0, -2.0, math.nan, -0.5])
    behaviour = torch.tensor([0.0, -31.0, -2.5, 0.0, -1.0])
    ids = torch.tensor([-1, 0, 2, -1, 2])
    assert turn_log_ratios(logprobs, behaviour, ids, turns=3).tolist() == [30.0, 0.0, 1.0]


def test_long_turns_are_summed_in_float64() -> None:
    gap = torch.full((100_000,), 1e-4)
    total = turn_log_ratios(gap, torch.zeros_like(gap), torch.zeros(100_000, dtype=torch.int64), turns=1)
    assert total.item() == pytest.approx(100_000 * gap[0].item(), rel=1e-12)


def test_turn_ids_beyond_the_trajectory_are_refused() -> None:
    with pytest.raises(ShapeError, match="below the number of turns"):
        turn_log_ratios(torch.zeros(1), torch.zeros(1), torch.tensor([2]), turns=2)
    with pytest.raises(LearnerError, match="below infinity"):
        turn_log_ratios(torch.zeros(1), torch.tensor([-math.inf]), torch.tensor([0]), turns=1)


# --- Weights of old data


def test_old_data_counts_less_and_nothing_beyond_the_limit_counts() -> None:
    out = replay_weights(tensor([math.log(4.0), 0.0, 0.0]), torch.tensor([0, 2, 3]), kappa=0.5, rho_cap=2.0, max_lag=2)
    assert out.raw_I.tolist() == pytest.approx([2.0, 0.25, 0.125])
    assert out.keep_I.tolist() == [True, True, False]
    assert out.weights_I.tolist() == pytest.approx([2 * 2 / 2.25, 2 * 0.25 / 2.25, 0.0])


def test_weights_of_nothing_kept_are_zeros() -> None:
    out = replay_weights(tensor([0.0, -math.inf]), torch.tensor([9, 1]), max_lag=2)
    assert out.weights_I.tolist() == [0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 9)), min_size=1, max_size=8), st.integers(0, 9))
def test_kept_weights_have_mean_one(rows: list[tuple[float, int]], max_lag: int) -> None:
    logs, lags = zip(*rows, strict=True)
    out = replay_weights(tensor(logs), torch.tensor(lags), kappa=0.8, max_lag=max_lag)
    assert out.keep_I.tolist() == [lag <= max_lag for lag in lags]
    if out.keep_I.any():
        assert out.weights_I[out.keep_I].mean().item() == pytest.approx(1.0)


# --- Precision, gradients, nonsense


@given(turns, numbers)
def test_p16_float32_agrees_with_float64_and_results_are_detached(
    rows: list[tuple[float, float, float]], bootstrap: float
) -> None:
    single = [column.to(torch.float32).requires_grad_() for column in columns(rows)]
    double = [column.detach().to(F64) for column in single]
    out, reference = vtrace(*single, bootstrap=bootstrap), vtrace(*double, bootstrap=bootstrap)
    assert out.targets_T.dtype == out.pg_advantages_T.dtype == torch.float32
    assert not out.targets_T.requires_grad
    assert out.targets_T.tolist() == pytest.approx(reference.targets_T.tolist(), rel=2e-5, abs=2e-6)


def test_a_trajectory_without_turns_has_no_targets() -> None:
    empty = torch.zeros(0)
    assert vtrace(empty, empty, empty, bootstrap=1.0).targets_T.shape == (0,)
    assert retrace(empty, empty, empty, empty, bootstrap=1.0).targets_T.shape == (0,)


def test_ten_thousand_turns_are_no_problem() -> None:
    n = 10_000
    out = vtrace(torch.ones(n), torch.zeros(n), torch.zeros(n), bootstrap=0.0)
    assert out.targets_T[0].item() == n


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", range(4))
def test_p17_numbers_that_are_none_are_refused_except_for_impossible_actions(bad: float, where: int) -> None:
    inputs = [tensor([0.5, 0.5]) for _ in range(3)]
    bootstrap = 0.0
    if where < 3:
        inputs[where][1] = bad
    else:
        bootstrap = bad
    if where == 2 and bad == -math.inf:
        assert torch.isfinite(vtrace(*inputs, bootstrap=bootstrap).targets_T).all()
        return
    with pytest.raises(LearnerError, match="must be finite"):
        vtrace(*inputs, bootstrap=bootstrap)


def test_ratios_beyond_meaning_stay_finite_without_truncation() -> None:
    out = vtrace(tensor([1.0]), tensor([0.0]), tensor([5000.0]), bootstrap=0.0, rho_bar=None, c_bar=1.0)
    assert math.isfinite(out.targets_T.item())


def test_traces_longer_than_the_errors_they_carry_are_refused() -> None:
    one = tensor([0.0])
    with pytest.raises(ConfigError, match="rho_bar must be at least c_bar"):
        vtrace(one, one, one, bootstrap=0.0, rho_bar=1.0, c_bar=2.0)
    with pytest.raises(ConfigError, match="rho_bar must be at least c_bar"):
        vtrace(one, one, one, bootstrap=0.0, rho_bar=1.0, c_bar=None)


@pytest.mark.parametrize("options", [{"gamma": 1.5}, {"lam": -0.1}, {"lam": math.nan}, {"c_bar": 0.0}])
def test_parameters_out_of_range_are_refused(options: dict[str, float]) -> None:
    one = tensor([0.0])
    with pytest.raises(ConfigError):
        vtrace(one, one, one, bootstrap=0.0, **options)


def test_shapes_must_match_and_be_of_one_trajectory() -> None:
    with pytest.raises(ShapeError, match="one shape"):
        vtrace(tensor([0.0]), tensor([0.0, 1.0]), tensor([0.0]), bootstrap=0.0)
    with pytest.raises(ShapeError, match="one trajectory"):
        vtrace(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), bootstrap=0.0)
    with pytest.raises(ShapeError, match="one entry per turn"):
        retrace(tensor([0.0]), tensor([0.0]), tensor([0.0]), tensor([0.0, 0.0]), bootstrap=0.0)


def test_what_a_trace_reads_must_be_given() -> None:
    one = tensor([0.5])
    with pytest.raises(ConfigError, match="log_ratios must be given"):
        retrace(one, one, one, bootstrap=0.0)
    with pytest.raises(ConfigError, match="policy_probs must be given"):
        retrace(one, one, one, one, kind="tree_backup", bootstrap=0.0)
    with pytest.raises(LearnerError, match="pass probabilities"):
        retrace(one, one, one, kind="tree_backup", policy_probs_T=tensor([-1.0]), bootstrap=0.0)
    with pytest.raises(ConfigError, match="kind must be one of"):
        retrace(one, one, one, kind="other", bootstrap=0.0)
    with pytest.raises(LearnerError, match="lags must be 0 or more"):
        replay_weights(one, torch.tensor([-1]), max_lag=3)
    for options in ({"kappa": 0.0}, {"max_lag": -1}, {"rho_cap": 0.0}):
        with pytest.raises(ConfigError):
            replay_weights(one, torch.tensor([0]), **{"max_lag": 3, **options})
