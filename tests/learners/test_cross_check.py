"""Our GAE, V-trace, PPO and GRPO against another implementation: torchrl's, on random inputs.

Where the two should agree they do, with gradients, to rounding: torchrl keeps discounts and clip ranges in float32 even
when everything else is float64. Where they should not, the difference is a
choice that one of them makes on purpose or a known mistake, and the test says which.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.llm import CISPOLoss, GRPOLoss, MCAdvantage
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    reward2go,
    vec_generalized_advantage_estimate,
    vtrace_advantage_estimate,
)

from turngate.learners.advantages import masked_whiten, reward_to_go
from turngate.learners.advantages.gae import gae, gae_flat_tokens, gae_segments
from turngate.learners.advantages.group import GroupScheme, group_advantages
from turngate.learners.aggregation import Aggregation, aggregate, token_weights
from turngate.learners.kl import kl_terms
from turngate.learners.losses import Clip, cispo_loss, ppo_loss
from turngate.learners.targets import vtrace

checked = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32 - 1)
discounts = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def agree(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def differ(one: Tensor, other: Tensor) -> None:
    assert (one - other).abs().max() > 1e-3


# --- advantages


@dataclass(frozen=True)
class Theirs:
    """One trajectory as torchrl wants it: (T, 1) columns, the value after each step, flags of its last step."""

    rewards_T: Tensor
    values_T: Tensor
    bootstrap: float | None

    def columns(self) -> dict[str, Tensor]:
        after = torch.cat([self.values_T[1:], torch.tensor([self.bootstrap or 0.0], dtype=torch.float64)])
        done = torch.zeros(len(self.values_T), dtype=torch.bool)
        done[-1] = True
        flags = {"done": done, "terminated": done & (self.bootstrap is None)}
        arrays = {"state_value": self.values_T, "next_state_value": after, "reward": self.rewards_T} | flags
        return {name: array.unsqueeze(-1) for name, array in arrays.items()}

    def gae(self, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        advantages, targets = generalized_advantage_estimate(gamma, lam, **self.columns())
        return advantages.squeeze(-1), targets.squeeze(-1)


bootstraps = st.one_of(st.none(), st.floats(-2, 2))


@checked
@given(seeds, st.integers(1, 12), bootstraps, discounts, discounts)
def test_gae_agrees_at_terminations_and_truncations(
    seed: int, steps: int, bootstrap: float | None, gamma: float, lam: float
) -> None:
    rewards_T, values_T = draw(seed, (steps,), (steps,))
    ours = gae(rewards_T, values_T, bootstrap=bootstrap, gamma=gamma, lam=lam)
    advantages_T, targets_T = Theirs(rewards_T, values_T, bootstrap).gae(gamma, lam)
    agree(ours.advantages_T, advantages_T)
    agree(ours.targets_T, targets_T)


@checked
@given(seeds, st.integers(2, 6), st.integers(2, 6), bootstraps)
def test_gae_of_one_trajectory_after_another_agrees_with_a_flat_batch(
    seed: int, first: int, second: int, bootstrap: float | None
) -> None:
    r1, v1, r2, v2 = draw(seed, (first,), (first,), (second,), (second,))
    columns = [Theirs(r, v, b).columns() for r, v, b in ((r1, v1, bootstrap), (r2, v2, None))]
    flat = {name: torch.cat([c[name] for c in columns]) for name in columns[0]}
    advantages, _ = vec_generalized_advantage_estimate(0.9, 0.8, **flat)
    ours = [gae(r1, v1, bootstrap=bootstrap, gamma=0.9, lam=0.8), gae(r2, v2, bootstrap=None, gamma=0.9, lam=0.8)]
    agree(torch.cat([part.advantages_T for part in ours]), advantages.squeeze(-1))


@checked
@given(seeds, st.integers(1, 8), bootstraps)
def test_a_rewritten_context_is_no_boundary_to_gae(seed: int, cut: int, bootstrap: float | None) -> None:
    rewards_T, values_T = draw(seed, (9,), (9,))
    parts = [[x[:cut], x[cut:]] for x in (rewards_T, values_T)]
    ours = gae_segments(*parts, bootstrap=bootstrap, gamma=0.9, lam=0.8)
    agree(ours.advantages_T, Theirs(rewards_T, values_T, bootstrap).gae(0.9, 0.8)[0])


MASK = torch.tensor([False, True, True, False, False, True, False, True, True])


@checked
@given(seeds, bootstraps, discounts, discounts)
def test_b3_1_observation_tokens_are_transitions_to_them_and_none_to_us(
    seed: int, bootstrap: float | None, gamma: float, lam: float
) -> None:
    """Flat GAE over whole sequences discounts by the length of observations; over policy tokens alone we agree."""
    rewards_T, values_T = draw(seed, (9,), (9,))
    rewards_T = rewards_T * MASK
    ours = gae_flat_tokens(MASK, rewards_T, values_T, bootstrap=bootstrap, gamma=gamma, lam=lam)
    alone, _ = Theirs(rewards_T[MASK], values_T[MASK], bootstrap).gae(gamma, lam)
    agree(ours.advantages_T[MASK], alone)
    whole, _ = Theirs(rewards_T, values_T, bootstrap).gae(0.9, 0.8)
    differ(gae_flat_tokens(MASK, rewards_T, values_T, bootstrap=bootstrap, gamma=0.9, lam=0.8).advantages_T, whole)


@checked
@given(seeds)
def test_b3_2_rewards_on_observations_reach_the_action_before_them_and_are_lost_under_a_mask(seed: int) -> None:
    rewards_T, values_T = draw(seed, (9,), (9,))
    rewards_T[3] += 2.0  # what the tool said after the first action
    ours = gae_flat_tokens(MASK, rewards_T, values_T, bootstrap=None, gamma=0.9, lam=0.8)
    moved_T = rewards_T[MASK]
    moved_T[1] += rewards_T[3] + rewards_T[4]
    moved_T[2] += rewards_T[6]
    agree(ours.advantages_T[MASK], Theirs(moved_T, values_T[MASK], None).gae(0.9, 0.8)[0])
    dropped, _ = Theirs(rewards_T[MASK], values_T[MASK], None).gae(0.9, 0.8)
    differ(ours.advantages_T[MASK], dropped)


@checked
@given(seeds, st.integers(1, 10), bootstraps, discounts, st.sampled_from([1.0, 1.5, 4.0]), st.sampled_from([0.5, 1.0]))
def test_vtrace_agrees(
    seed: int, steps: int, bootstrap: float | None, gamma: float, rho_bar: float, c_bar: float
) -> None:
    rewards_T, values_T, logs_T = draw(seed, (steps,), (steps,), (steps,))
    bars = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": rho_bar}
    ours = vtrace(rewards_T, values_T, logs_T, bootstrap=bootstrap, gamma=gamma, **bars)
    columns = Theirs(rewards_T, values_T, bootstrap).columns()
    logs = {"log_pi": logs_T.unsqueeze(-1), "log_mu": torch.zeros_like(logs_T).unsqueeze(-1)}
    advantages, targets = vtrace_advantage_estimate(gamma, **logs, **columns, rho_thresh=rho_bar, c_thresh=c_bar)
    agree(ours.targets_T, targets.squeeze(-1))
    agree(ours.pg_advantages_T, advantages.squeeze(-1))


@checked
@given(seeds, st.sampled_from([0.5, 0.95, 1.0]))
def test_returns_to_go_agree_over_policy_tokens_and_observations_cost_us_no_discount(seed: int, gamma: float) -> None:
    (rewards_T,) = draw(seed, (9,))
    rewards_T = rewards_T * MASK
    ours = reward_to_go(rewards_T, MASK, gamma=gamma)
    agree(ours[MASK], theirs_to_go(rewards_T[MASK], gamma))
    differ(reward_to_go(rewards_T, MASK, gamma=0.5)[1:], theirs_to_go(rewards_T, 0.5)[1:] * MASK[1:])


def theirs_to_go(rewards_T: Tensor, gamma: float) -> Tensor:
    done = torch.zeros(len(rewards_T), 1, dtype=torch.bool)
    done[-1] = True
    return reward2go(rewards_T.unsqueeze(-1), done, gamma).flatten()


# --- groups

GRPO_ADVANTAGE = GroupScheme("mean", "std_sample", eps=0.0)


def their_group_advantages(rewards: list[Tensor], **options: Any) -> list[float]:
    """Return the advantage of the first step of each trajectory of one group."""
    transform = MCAdvantage(grpo_size=len(rewards), prompt_key="query", **options)
    out: Any = None
    for rewards_T in rewards:
        steps = len(rewards_T)
        done = torch.zeros(steps, 1, dtype=torch.bool)
        done[-1] = True
        content = {"next": {"reward": rewards_T.unsqueeze(-1), "done": done}, "query": torch.zeros(steps, 1).long()}
        out = transform.inv(TensorDict(content, batch_size=[steps]))
    starts = [0, *torch.tensor([len(r) for r in rewards]).cumsum(0).tolist()[:-1]]
    return [float(out["advantage"].flatten()[start]) for start in starts]


@checked
@given(seeds, st.integers(2, 6))
def test_grpo_advantages_agree_with_one_vote_per_trajectory(seed: int, members: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (members,), generator=generator).tolist()
    rewards = draw(seed, *((length,) for length in lengths))
    returns_G = torch.stack([r.sum() for r in rewards])
    ours = group_advantages(returns_G, scheme=GRPO_ADVANTAGE).advantages_G.tolist()
    assert ours == [pytest.approx(a, rel=1e-9) for a in their_group_advantages(rewards, trajectory_return="sum")]


def test_b1_2_every_step_votes_in_their_default_and_long_trajectories_set_the_baseline() -> None:
    rewards = [torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]), torch.tensor([0.0])]
    ours = group_advantages(torch.tensor([1.0, 0.0]), scheme=GRPO_ADVANTAGE).advantages_G
    assert ours.tolist() == [pytest.approx(math.sqrt(0.5)), pytest.approx(-math.sqrt(0.5))]
    theirs = their_group_advantages(rewards)
    assert theirs[0] == theirs[1] < 0  # the first step of the winner looks like the loser's


# --- losses


class GivenLogprobs:
    """An actor whose log-probs are a tensor: torchrl's language-model losses ask it for a distribution."""

    def __init__(self, logprobs_BT: Tensor, mask_BT: Tensor) -> None:
        self.logprobs_BT, self.mask = logprobs_BT, mask_BT

    def get_dist(self, *_: object, **__: object) -> "GivenLogprobs":
        return self

    def log_prob(self, _: Tensor) -> Tensor:
        return self.logprobs_BT


@dataclass(frozen=True)
class Tokens:
    """Random tokens of five rows; one has none to train on."""

    logprobs_BT: Tensor
    old_BT: Tensor
    reference_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor

    @classmethod
    def of(cls, seed: int, *, empty_row: bool = False, masked: bool = True) -> "Tokens":
        arrays = draw(seed, (5, 7), (5, 7), (5, 7), (5, 7), (5, 7))
        mask_BT = arrays[4] > -0.5 if masked else torch.ones(5, 7, dtype=torch.bool)
        mask_BT[:, 0] = True
        mask_BT[4] &= not empty_row
        old = -arrays[1].abs() - 0.5
        return cls((old + 0.4 * arrays[0]).requires_grad_(), old, old + 0.3 * arrays[2], arrays[3], mask_BT)

    def theirs(self, loss: Callable[..., GRPOLoss], **options: Any) -> Tensor:
        """Return a loss of torchrl; a KL term comes on top of the objective."""
        # Attribute assignment would register modules only; an actor that is none is set around it.
        made = loss(None, entropy_bonus=False, **options)
        vars(made)["actor_network"] = GivenLogprobs(self.logprobs_BT, self.mask_BT)
        content = {
            "tokens": {"full": torch.zeros(5, 7, dtype=torch.int64)},
            "log_probs": {"full": self.old_BT},
            "next": {"ref_log_probs": {"full": self.reference_BT}},
            "advantage": self.advantages_BT.unsqueeze(-1),
        }
        out = made(TensorDict(content, batch_size=[5]))
        total = out.loss_objective.sum()
        return total if out.loss_kl_to_ref is None else total + out.loss_kl_to_ref

    def ours(self, loss_BT: Tensor, mode: Aggregation, **options: Any) -> Tensor:
        return aggregate(loss_BT, token_weights(self.mask_BT, mode, **options))

    def ppo(self, clip: Clip) -> Tensor:
        return ppo_loss(self.logprobs_BT, self.old_BT, self.advantages_BT, self.mask_BT, clip=clip).loss

    def grad(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.logprobs_BT, retain_graph=True)[0]


@checked
@given(seeds, st.sampled_from([0.1, 0.2, 0.5]), st.sampled_from([0.1, 0.28, 3.0]))
def test_the_grpo_loss_and_its_gradient_agree_per_token_mean(seed: int, low: float, high: float) -> None:
    tokens = Tokens.of(seed)
    theirs = tokens.theirs(GRPOLoss, clip_epsilon=(low, high), aggregation="token_mean")
    ours = tokens.ours(tokens.ppo(Clip(low, high)), "token_mean")
    agree(ours, theirs)
    agree(tokens.grad(ours), tokens.grad(theirs))


@checked
@given(seeds)
def test_what_they_call_prompt_mean_is_a_mean_over_sequences(seed: int) -> None:
    tokens = Tokens.of(seed)
    theirs = tokens.theirs(GRPOLoss, aggregation="prompt_mean")
    loss_BT = tokens.ppo(Clip(0.2, 0.2))
    agree(tokens.ours(loss_BT, "seq_mean_token_mean"), theirs)
    groups = torch.tensor([0, 0, 0, 1, 1]).unsqueeze(1).expand(5, 7)
    assert not torch.isclose(tokens.ours(loss_BT, "prompt_mean", group_ids=groups), theirs)


@checked
@given(seeds)
def test_rows_without_any_token_count_to_them_and_not_to_us(seed: int) -> None:
    tokens = Tokens.of(seed, empty_row=True)
    theirs = tokens.theirs(GRPOLoss, aggregation="prompt_mean")
    loss_BT = tokens.ppo(Clip(0.2, 0.2))
    counted = tokens.ours(loss_BT, "seq_mean_token_mean", count_empty=True)
    agree(counted, theirs)
    agree(tokens.ours(loss_BT, "seq_mean_token_mean"), counted * 5 / 4)


@checked
@given(seeds)
def test_cispo_has_their_gradient_where_nothing_is_clipped_and_keeps_it_where_they_lose_it(seed: int) -> None:
    """The paper's clipped weight is a constant (2506.13585 eq. 4); theirs is differentiated, so the clip cuts it."""
    tokens = Tokens.of(seed)
    theirs = tokens.theirs(CISPOLoss, clip_epsilon=(0.2, 0.28))
    arrays = (tokens.logprobs_BT, tokens.old_BT, tokens.advantages_BT, tokens.mask_BT)
    loss_BT, weights_BT = cispo_loss(*arrays, clip=Clip(0.2, 0.28))
    ours = tokens.grad(tokens.ours(loss_BT, "token_mean"))
    ratio_BT = (tokens.logprobs_BT - tokens.old_BT).detach().exp()
    inside_BT = (ratio_BT > 0.8) & (ratio_BT < 1.28)
    agree(ours * inside_BT, tokens.grad(theirs) * inside_BT)
    lost_BT = tokens.mask_BT & ~inside_BT
    assert lost_BT.any()
    assert (tokens.grad(theirs)[lost_BT] == 0).all()
    expected = -(weights_BT * tokens.advantages_BT / tokens.mask_BT.sum())
    agree(ours[lost_BT], expected[lost_BT])


@checked
@given(seeds, st.booleans())
def test_b2_14_the_kl_term_agrees_without_padding_and_theirs_is_diluted_by_it(seed: int, masked: bool) -> None:
    """Their KL term is a mean over all positions of the batch, masked ones counting 0."""
    tokens = Tokens.of(seed, masked=masked)
    with_kl = tokens.theirs(GRPOLoss, kl_to_ref_coeff=1.0)
    theirs = with_kl - tokens.theirs(GRPOLoss)
    ours = tokens.ours(kl_terms(tokens.logprobs_BT, tokens.reference_BT).k3, "token_mean")
    share = tokens.mask_BT.sum() / tokens.mask_BT.numel()
    agree(ours * share, theirs)
    agree(tokens.grad(ours) * share, tokens.grad(theirs))


@checked
@given(seeds, st.sampled_from([0.1, 0.3]))
def test_the_ppo_loss_and_its_gradient_agree_from_the_logits_on(seed: int, eps: float) -> None:
    logits_PV, old_PV, advantages_P = draw(seed, (20, 6), (20, 6), (20,))
    actions_P = torch.randint(0, 6, (20,), generator=torch.Generator().manual_seed(seed))
    old_P = torch.log_softmax(old_PV * 0.3 + logits_PV, -1).gather(1, actions_P.unsqueeze(1)).squeeze(1)
    layer = torch.nn.Linear(6, 6, bias=False, dtype=torch.float64)
    layer.weight.data.copy_(torch.eye(6))
    parts: list[Any] = [
        TensorDictModule(layer, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.Categorical
        ),
    ]
    loss = ClipPPOLoss(
        ProbabilisticTensorDictSequential(*parts), None, clip_epsilon=eps, entropy_bonus=False, critic_coeff=None
    )
    content = {"observation": logits_PV, "action": actions_P, "action_log_prob": old_P}
    out = loss(TensorDict(content | {"advantage": advantages_P.unsqueeze(-1)}, batch_size=[20]))
    theirs = torch.autograd.grad(out["loss_objective"], list(loss.parameters()))[0]
    weight = layer.weight.detach().clone().requires_grad_()
    logits = logits_PV @ weight.T
    logprobs_P = torch.log_softmax(logits, -1).gather(1, actions_P.unsqueeze(1)).squeeze(1)
    mask_P = torch.ones(20, dtype=torch.bool)
    clip = Clip(eps, eps)
    loss_P = ppo_loss(logprobs_P, old_P, advantages_P, mask_P, clip=clip).loss
    ours = aggregate(loss_P, token_weights(mask_P, "token_mean"))
    agree(ours, out["loss_objective"])
    agree(torch.autograd.grad(ours, weight)[0], theirs)


@checked
@given(seeds)
def test_whitening_is_the_normalisation_of_their_ppo(seed: int) -> None:
    (x,) = draw(seed, (6, 4))
    mask = torch.ones(6, 4, dtype=torch.bool)
    theirs = (x - x.mean()) / x.std()
    agree(masked_whiten(x, mask), theirs)
