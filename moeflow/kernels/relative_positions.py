"""Buckets of relative positions: near distances have one each, further ones share ever larger ones.

Source: T5 (1910.10683, section 2.1), as transformers computes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bucket_of(distances: Tensor, *, num_buckets: int, max_distance: int, is_bidirectional: bool) -> Tensor:
    """Return the bucket of each distance, the key's position minus the query's.

    If not `is_bidirectional`, keys behind the query have the bucket of distance 0, since they are masked.

    Shapes: distances [...] int64 -> the same, from 0 to num_buckets - 1.
    """
    first = torch.zeros_like(distances)
    if is_bidirectional:
        num_buckets //= 2
        first = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    num_exact = num_buckets // 2
    growth = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact)
    shared = num_exact + (growth * (num_buckets - num_exact)).long()
    return first + torch.where(distances < num_exact, distances, shared.clamp(max=num_buckets - 1))
