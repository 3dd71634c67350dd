"""A dense Llama with trainable experts in place of its feed-forward networks.

The experts share the dense matrices, and the down projection is linear. So a token costs little more than in the
dense model, for any number of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moeflow.train.experts.adapters import DOWN, GATE, UP, Adapters
from moeflow.train.speculators.student import Student

# layer, input of its block [N, H], router logits [N, E]; None without a router
OnBlock = Callable[[int, Tensor, Tensor | None], None]


def _ignore(layer: int, inputs: Tensor, logits: Tensor | None) -> None:
    """Watch nothing."""


@dataclass(frozen=True, slots=True)
class ExpertNetwork(Student):
    """A model with experts; without routers, all tokens use the only expert."""

    adapters: Adapters
    routers: Sequence[Tensor] = ()  # [E, H] float32 of each layer
    top_k: int = 1
    on_block: OnBlock = _ignore

    def mean_loss(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the mean negative log-likelihood of the tokens of independent pieces, except the first of each."""
        token_ids = torch.cat(list(pieces))
        lengths = [len(piece) for piece in pieces]
        predicts = torch.ones(len(token_ids), dtype=torch.bool)
        predicts[torch.tensor(lengths).cumsum(0) - 1] = False
        with self._precision():
            hidden = self.hidden(token_ids, lengths)[predicts]
            logits = F.linear(hidden, self.head)
        return F.cross_entropy(logits.float(), torch.cat([piece[1:] for piece in pieces]))

    def _ffn(self, x: Tensor, layer: int) -> Tensor:
        """Return the block's result. Shapes: x [N, H] float32 -> [N, H]."""
        prefix = f"model.layers.{layer}.mlp"
        topk_ids, topk_weights = self._route(layer, x)
        gate, up = (self._linear(x, f"{prefix}.{name}") for name in (GATE, UP))
        inputs = x.to(gate.dtype)
        parts = [
            zip(*(factor.unbind() for factor in self.adapters.of(layer, name)), strict=True)
            for name in (GATE, UP, DOWN)
        ]
        rows_of_all, inner, changes = [], [], []
        for expert, (of_gate, of_up, of_down) in enumerate(zip(*parts, strict=True)):
            rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
            if not len(rows):
                continue
            own, weights = inputs[rows], topk_weights[rows, slots][:, None].to(gate.dtype)
            activated = F.silu(gate[rows] + _product(own, of_gate)) * (up[rows] + _product(own, of_up)) * weights
            rows_of_all.append(rows)
            inner.append(activated)
            changes.append(_product(activated, of_down))
        rows = torch.cat(rows_of_all)
        mixed = _summed(len(x), rows, torch.cat(inner))
        return self._linear(mixed, f"{prefix}.{DOWN}") + _summed(len(x), rows, torch.cat(changes))

    def _route(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return topk_ids and topk_weights, [N, K] each, as Mixtral's router does."""
        if not self.routers:
            self.on_block(layer, x, None)
            return torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1)
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(x.float(), self.routers[layer])
            self.on_block(layer, x, logits)
            top = logits.topk(self.top_k, dim=-1)
            return top.indices, top.values.softmax(dim=-1)

    def _precision(self) -> AbstractContextManager[object]:
        is_bfloat16 = self.head.dtype == torch.bfloat16
        return torch.autocast("cpu", torch.bfloat16) if is_bfloat16 else nullcontext()


def _product(x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    a, b = factors
    return x @ a @ b


def _summed(num_rows: int, rows: Tensor, values: Tensor) -> Tensor:
    """Add values [M, n] to their rows. Shapes: rows [M] -> [num_rows, n]."""
    return values.new_zeros(num_rows, values.shape[1]).index_add(0, rows, values)


def training_dtype() -> torch.dtype:
    """Return bfloat16 on CPUs with matrix products of this type, otherwise float32."""
    found = torch.cpu.get_capabilities()
    return torch.bfloat16 if any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else torch.float32
