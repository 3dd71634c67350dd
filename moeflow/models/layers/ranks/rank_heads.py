"""What ranks exchange where each has a block of a layer's attention heads: results, and what norms run over."""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.kernels.norm import rms_norm
from moeflow.parallel.blocks import HeadBlocks, scaled
from moeflow.parallel.columns import Columns
from moeflow.parallel.group import Group


class RankHeads:
    """This rank's heads among those of all. Keys and values of its KV heads are all that its cache holds."""

    def __init__(self, group: Group, blocks: HeadBlocks, head_dim: int) -> None:
        self.queries, self.keys = blocks.queries[group.rank], blocks.keys[group.rank]
        self._group, self._head_dim = group, head_dim
        self._context = Columns(group, "attention", [scaled(block, head_dim) for block in blocks.queries])
        self._num_queries = [len(block) for block in blocks.queries]
        self._num_owned_keys = [len(block) for block in blocks.owned_keys()]

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
        num_tokens, dim = q.shape[0], self._head_dim
        sent = torch.cat([q, k[:, : self._num_owned_keys[self._group.rank] * dim]], dim=1)
        found = self._group.all_gather("queries and keys", sent.view(-1))
        halves = [
            torch.split(part.view(num_tokens, -1), [queries * dim, keys * dim], dim=1)
            for part, queries, keys in zip(found, self._num_queries, self._num_owned_keys, strict=True)
        ]
        all_q, all_k = (torch.cat(half, dim=1) for half in zip(*halves, strict=True))
        return all_q, all_k
