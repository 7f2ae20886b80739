"""KL estimators."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.kl import kl_terms
from turngate.learners.ratios import ShapeError


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_b2_13_each_estimator_has_the_gradient_it_has_and_no_other(a: list[float], b: list[float]) -> None:
    """P13: by enumeration, k1 gives no gradient, k2 the reverse KL's, k3 the forward KL's."""
    logits = torch.tensor(a, dtype=torch.float64, requires_grad=True)
    logp, ref = torch.log_softmax(logits, 0), torch.log_softmax(torch.tensor(b, dtype=torch.float64), 0)
    terms, probs = kl_terms(logp, ref), logp.exp().detach()

    def grad(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of, logits, retain_graph=True)[0]

    reverse, forward = (logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    torch.testing.assert_close(grad((probs * terms.k1).sum()), torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(grad((probs * terms.k2).sum()), grad(reverse), atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(grad((probs * terms.k3).sum()), grad(forward), atol=1e-9, rtol=1e-6)
    ratio_k3 = (logp - logp.detach()).exp() * terms.k3
    torch.testing.assert_close(grad((probs * ratio_k3).sum()), grad(reverse), atol=1e-9, rtol=1e-6)
    assert (probs * terms.k1).sum().item() == pytest.approx((probs * terms.k3).sum().item())


def test_k3_keeps_its_digits_for_policies_that_hardly_differ() -> None:
    logp, ref = torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12])
    assert kl_terms(logp, ref).k3.item() == pytest.approx(2**-25, rel=1e-3)


def test_equal_policies_have_no_divergence() -> None:
    terms = kl_terms(torch.tensor([-1.0, -9.0]), torch.tensor([-1.0, -9.0]))
    assert [t.abs().sum().item() for t in (terms.k1, terms.k2, terms.k3)] == [0.0, 0.0, 0.0]


def test_misaligned_arrays_are_refused() -> None:
    with pytest.raises(ShapeError):
        kl_terms(torch.zeros(2), torch.zeros(2, 1))
