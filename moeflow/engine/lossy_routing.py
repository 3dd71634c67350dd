"""Has a network choose an encoder's experts in the place of its routers, as SiDA was published (2310.18859, section 3).

Wrong predictions change answers: a server marks it in its model's name. Routers are not asked, so that
what a pass needs is known before it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moeflow.core.batch import Batch
from moeflow.core.request import Request
from moeflow.experts.prefetch.expert_tables import ExpertTables
from moeflow.models.layers.moe import MoE


class LossyRouting:
    """Gives an encoder's layers the experts and weights of the tables: alpha, the network's probabilities."""

    def __init__(self, tables: ExpertTables, blocks: Sequence[MoE], *, top_k: int) -> None:
        """Take the encoder's layers with experts, in order, and how many experts compute for a token."""
        self._tables, self._top_k = tables, top_k
        self._experts = self._alpha = torch.empty(0)  # of all input tokens of a pass: [T, layers, K]
        for layer, block in enumerate(blocks):
            block.given = partial(self._choice, layer)

    def expect(self, request: Request) -> None:
        """Have the table of a request's input built, which waits for its pass."""
        self._tables.expect(request)

    def begin_pass(self, batch: Batch) -> None:
        """Have the layers compute with what tables say of the pass's inputs. Blocks: until these are there."""
        self._tables.begin_pass(batch)
        if tables := self._tables.of_pass():
            self._experts = torch.cat([table.experts[..., : self._top_k] for table in tables])
            self._alpha = torch.cat([table.alpha[..., : self._top_k] for table in tables])

    def close(self) -> None:
        """End the lane of the tables. Blocks: until it is through with the input that it is at."""
        self._tables.close()

    def _choice(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return topk_ids [T, K] int64 and topk_weights [T, K] float32."""
        return self._experts[:, layer].contiguous(), self._alpha[:, layer].clone(memory_format=torch.contiguous_format)
