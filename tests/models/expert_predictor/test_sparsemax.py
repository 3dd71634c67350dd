"""SparseMax against its definition: the nearest point of the simplex, by its optimality conditions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moeflow.models.expert_predictor.sparsemax import sparsemax

rows = st.lists(st.floats(-50, 50), min_size=1, max_size=24)


@given(rows)
def test_it_is_the_projection_on_the_simplex(row):
    """KKT of min |p - z|^2: p = max(z - tau, 0), with the tau that makes p add up to 1. Bisection finds it, too."""
    scores = torch.tensor(row, dtype=torch.float64)
    weights = sparsemax(scores)
    assert (weights >= 0).all()
    assert abs(float(weights.sum()) - 1) < 1e-9
    low, high = float(scores.max()) - 1, float(scores.max())
    for _ in range(80):
        tau = (low + high) / 2
        low, high = (tau, high) if float((scores - tau).clamp(min=0).sum()) > 1 else (low, tau)
    torch.testing.assert_close(weights, (scores - low).clamp(min=0), rtol=0, atol=1e-9)


def test_masked_scores_get_nothing_and_change_nothing():
    scores = torch.tensor([0.3, -torch.inf, 0.1, -torch.inf])
    weights = sparsemax(scores)
    assert weights[[1, 3]].tolist() == [0, 0]
    torch.testing.assert_close(weights[[0, 2]], sparsemax(scores[[0, 2]]))


def test_its_gradient_is_that_of_differences():
    scores = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert ((sparsemax(scores) > 0).sum(-1) < 7).any()
    torch.autograd.gradcheck(sparsemax, (scores,))
