"""Short passes: both processors compute their experts of a layer at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moeflow.experts.hybrid.hybrid_experts import HybridExperts
from moeflow.experts.hybrid.seam import Seam

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class SharedSums:
    """Computes the experts of passes that need few of them."""

    def __init__(self, seam: Seam, top_k: int) -> None:
        """Each token's first `top_k` choices are the router's. Parts of the shared expert follow."""
        self._seam, self._top_k = seam, top_k
        self._seen: list[NDArray[np.int64]] = []

    def begin_pass(self, num_tokens: int) -> None:
        """Begin a pass of so many tokens, without padding."""
        self._seam.num_tokens = num_tokens
        self._seen.clear()

    def choices(self) -> NDArray[np.int64] | None:
        """Return the experts that the pass has chosen, [layers, T, K]; None if the host has not seen them."""
        return np.stack(self._seen) if self._seen else None

    def sums(self, experts: HybridExperts, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `ExpertSums`: the GPU's sum, then the CPU's."""
        num_rows = len(hidden)
        self._seam.send(hidden, topk_ids, topk_weights)
        total = experts.on_gpu.sums(hidden, topk_ids, topk_weights) if len(experts.matrices.down) else None
        self._seam.compute(experts.layer, experts.on_cpu, num_rows, self._see)
        sums = self._seam.receive(num_rows)
        return sums if total is None else total.add_(sums)

    def _see(self, topk_ids: NDArray[np.int64]) -> None:
        self._seen.append(topk_ids[:, : self._top_k].copy())


class GPUSums:
    """Computes the experts of layers that have all of them in slots."""

    def sums(self, experts: HybridExperts, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `ExpertSums`."""
        return experts.on_gpu.sums(hidden, topk_ids, topk_weights)
