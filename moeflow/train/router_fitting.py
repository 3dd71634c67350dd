"""Fits routers without training: one direction per expert, found by clustering the layer's inputs.

The inputs of a feed-forward block share a large mean, independent of the text. It is projected out. The rest is
clustered by angle (spherical k-means), and the centroids become the rows of the router. They are orthogonal to the
mean, so the router needs no bias. Clusters of real text differ in size, so routing is uneven, as in trained models.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

# Standard deviation of one token's logits over experts. At 1 the first of 8 experts has about half of the probability,
# and seven tenths of the first two experts' sum.
LOGIT_SPREAD = 1.0
_MAX_ROUNDS = 25


def fit_router(inputs: torch.Tensor, num_experts: int, seed: int) -> torch.Tensor:
    """Return router weights with the highest logit for a token's own cluster.

    Shapes: inputs [T, H], T >= 1 -> [E, H] float32. The same arguments give the same result.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = inputs.float()
    mean = F.normalize(inputs.mean(dim=0), dim=0)
    inputs = inputs - (inputs @ mean)[:, None] * mean
    is_telling = inputs.norm(dim=1) > 1e-6
    centroids = spherical_kmeans(F.normalize(inputs[is_telling], dim=1), num_experts, generator)
    centroids = F.normalize(centroids - (centroids @ mean)[:, None] * mean, dim=1)
    logits = inputs @ centroids.T
    spread = logits.std(dim=1, correction=0).mean().item()
    return centroids * (LOGIT_SPREAD / spread if spread > 1e-6 else 1.0)


def spherical_kmeans(points: torch.Tensor, num_clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Cluster unit vectors by angle and return the unit centroids.

    With fewer points than clusters, the remaining centroids are random.

    Shapes: points [T, H] -> [num_clusters, H].
    """
    centroids = _spread_out(points, num_clusters, generator)
    previous = None
    for _ in range(_MAX_ROUNDS):
        nearest = (points @ centroids.T).argmax(dim=1)
        if previous is not None and torch.equal(nearest, previous):
            break
        previous = nearest
        members = F.one_hot(nearest, num_clusters).T.to(points.dtype)
        # An empty cluster keeps its direction: its centroid was a point, and may get one again.
        is_empty = members.sum(dim=1, keepdim=True) == 0
        centroids = torch.where(is_empty, centroids, F.normalize(members @ points, dim=1))
    return centroids


def _spread_out(points: torch.Tensor, num_clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Choose distant first centroids: k-means++ with 1 - cos as distance."""
    centroids = points[:0]
    distance = torch.full((len(points),), 2.0)
    while len(centroids) < num_clusters:
        if not distance.any():  # every distinct point is taken
            missing = torch.randn(num_clusters - len(centroids), points.shape[1], generator=generator)
            return torch.cat([centroids, F.normalize(missing, dim=1)])
        chosen = torch.multinomial(distance, 1, generator=generator)
        centroids = torch.cat([centroids, points[chosen]])
        distance = torch.minimum(distance, 1.0 - points @ centroids[-1])
        distance[distance < 1e-5] = 0.0
    return centroids
