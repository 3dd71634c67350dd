"""What ranks exchange where each has a block of a layer's attention heads: results, and what norms run over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moeflow.kernels.norm import rms_norm
from moeflow.parallel.blocks import HeadBlocks, scaled
from moeflow.parallel.columns import Columns

MakeColumns = Callable[[str, Sequence[range]], Columns]  # from a name for errors, and each rank's block


class RankHeads:
    """This rank's heads among those of all. Keys and values of its KV heads are all that its cache holds."""

    def __init__(self, columns: MakeColumns, rank: int, blocks: HeadBlocks, head_dim: int) -> None:
        self.queries, self.keys = blocks.queries[rank], blocks.keys[rank]
        self._head_dim = head_dim
        self._context = columns("attention", [scaled(block, head_dim) for block in blocks.queries])
        owned = blocks.owned_keys()
        self._num_owned_keys = len(owned[rank])
        self._sizes = [len(each) * head_dim for pair in zip(blocks.queries, owned, strict=True) for each in pair]
        ends = list(accumulate(self._sizes))[1::2]
        self._normed = columns("queries and keys", [range(*bounds) for bounds in pairwise([0, *ends])])

    def gather(self, attended: Tensor) -> Tensor:
        """Return what all heads attended to. Shapes: [T, own Q * D] -> [T, Q * D]. Raises: GroupError."""
        return self._context.gather(attended)

    def normalise(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
        """Return this rank's queries, keys and values after norms over the queries and the keys of all ranks.

        Shapes: qkv [T, (own Q + 2 own KV) * D], q_norm [Q * D], k_norm [KV * D] -> as qkv. Raises: GroupError.
        """
        dim = self._head_dim
        q, k, v = torch.split(qkv, [len(self.queries) * dim, len(self.keys) * dim, len(self.keys) * dim], dim=1)
        all_q, all_k = self._gather_queries_and_keys(q, k)
        q = rms_norm(all_q, q_norm, eps)[:, self.queries.start * dim : self.queries.stop * dim]
        k = rms_norm(all_k, k_norm, eps)[:, self.keys.start * dim : self.keys.stop * dim]
        return torch.cat([q, k, v], dim=1)

    def _gather_queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: q [T, own Q * D], k [T, own KV * D] -> [T, Q * D], [T, KV * D]."""
        sent = torch.cat([q, k[:, : self._num_owned_keys * self._head_dim]], dim=1)
        found = torch.split(self._normed.gather(sent), self._sizes, dim=1)
        return torch.cat(found[::2], dim=1), torch.cat(found[1::2], dim=1)
