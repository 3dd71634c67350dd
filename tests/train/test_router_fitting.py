import pytest
import torch
from torch.nn import functional as F

from moeflow.train.router_fitting import LOGIT_SPREAD, fit_router, spherical_kmeans

HIDDEN = 24


def clustered(sizes, noise=0.2, mean=5.0):
    """Points around a few random directions, with one large common mean as in real hidden states."""
    generator = torch.Generator().manual_seed(3)
    directions = F.normalize(torch.randn(len(sizes), HIDDEN, generator=generator), dim=1)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    points = directions[labels] + noise * torch.randn(len(labels), HIDDEN, generator=generator) / HIDDEN**0.5
    return points + mean, labels


def test_each_cluster_gets_an_expert_of_its_own():
    inputs, labels = clustered([200, 120, 60, 20], noise=0.05)
    top = (inputs @ fit_router(inputs, 4, seed=0).T).argmax(dim=1)
    for label in range(4):
        assert len(top[labels == label].unique()) == 1
    assert len(top.unique()) == 4


def test_unseen_tokens_go_where_their_cluster_goes():
    inputs, labels = clustered([200, 200, 200])
    fitted, unseen = inputs[::2], inputs[1::2]
    router = fit_router(fitted, 3, seed=0)
    expected = {int(label): top for label, top in zip(labels[::2], (fitted @ router.T).argmax(dim=1), strict=True)}
    assert all(
        top == expected[int(label)] for label, top in zip(labels[1::2], (unseen @ router.T).argmax(dim=1), strict=True)
    )


def test_the_common_mean_has_no_say():
    inputs, _ = clustered([100, 100, 100])
    router = fit_router(inputs, 3, seed=0)
    torch.testing.assert_close(router @ F.normalize(inputs.mean(dim=0), dim=0), torch.zeros(3), atol=1e-4, rtol=0)


def test_logits_are_spread_as_promised():
    inputs, _ = clustered([100, 100, 100, 100])
    logits = inputs @ fit_router(inputs, 4, seed=0).T
    assert logits.std(dim=1, correction=0).mean().item() == pytest.approx(LOGIT_SPREAD, rel=1e-3)


def test_same_seed_same_router_other_seed_other_router():
    inputs, _ = clustered([80, 80, 80])
    assert torch.equal(fit_router(inputs, 5, seed=1), fit_router(inputs, 5, seed=1))
    assert not torch.equal(fit_router(inputs, 5, seed=1), fit_router(inputs, 5, seed=2))


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_fewer_tokens_than_experts(num_tokens):
    inputs = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(0))
    router = fit_router(inputs, 8, seed=0)
    assert router.shape == (8, HIDDEN)
    assert torch.isfinite(router).all()
    assert (router.norm(dim=1) > 0).all()
    assert torch.pdist(router).min() > 1e-3  # no two alike


def test_equal_tokens_still_give_a_router():
    router = fit_router(torch.ones(50, HIDDEN), 4, seed=0)
    assert torch.isfinite(router).all()
    assert (router.norm(dim=1) > 0).all()


def test_one_expert_takes_all():
    inputs, _ = clustered([20, 20])
    assert fit_router(inputs, 1, seed=0).shape == (1, HIDDEN)


def test_kmeans_is_a_fixed_point():
    inputs, _ = clustered([90, 50, 30], mean=0.0)
    points = F.normalize(inputs, dim=1)
    centroids = spherical_kmeans(points, 3, torch.Generator().manual_seed(0))
    nearest = (points @ centroids.T).argmax(dim=1)
    for cluster in range(3):
        mean = F.normalize(points[nearest == cluster].sum(dim=0), dim=0)
        torch.testing.assert_close(centroids[cluster], mean, atol=1e-5, rtol=0)


def test_kmeans_finds_what_brute_force_finds():
    inputs, _ = clustered([3, 3], mean=0.0, noise=0.6)
    points = F.normalize(inputs, dim=1)
    best = 0.0
    for mask in range(1, 2 ** len(points) - 1):
        inside = torch.tensor([bool(mask >> i & 1) for i in range(len(points))])
        best = max(best, (points[inside].sum(dim=0).norm() + points[~inside].sum(dim=0).norm()).item())
    centroids = spherical_kmeans(points, 2, torch.Generator().manual_seed(0))
    found = (points @ centroids.T).max(dim=1).values.sum().item()
    assert found == pytest.approx(best, rel=1e-5)
