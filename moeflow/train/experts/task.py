"""Trains experts on the next token: one alone on its text, or all with their routers on all texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moeflow.train.examples import epoch_order
from moeflow.train.experts.adapters import Adapters
from moeflow.train.experts.network import ExpertNetwork
from moeflow.train.loop import TrainingTask
from moeflow.train.schedule import Progress, cosine

_BETAS: Final = (0.9, 0.95)
_WEIGHT_DECAY: Final = 0.01
_WARM_UP_STEPS: Final = 8
_LAST_RATE: Final = 0.1  # of the learning rate
_BALANCE: Final = 0.01  # weight of the load-balancing loss
EVALUATED: Final = 4  # pieces of one pass

Pieces = Sequence[Tensor]  # token ids, [n] int64


class ExpertTask(TrainingTask[Pieces]):
    """Next tokens of one text or of several. A batch has `rows` pieces of each text."""

    def __init__(
        self,
        network: ExpertNetwork,
        texts: Sequence[Pieces],
        held_out: Pieces,
        *,
        rows: int,
        learning_rate: float,
        seed: int,
    ) -> None:
        """Adapters and routers are copied, then trained."""
        self._texts, self._held_out, self._rows = texts, held_out, rows
        self._learning_rate, self._seed = learning_rate, seed
        self._balance: list[Tensor] = []  # of the layers of this pass
        factors = {name: each.clone().requires_grad_() for name, each in network.adapters.factors.items()}
        routers = [router.clone().requires_grad_() for router in network.routers]
        self.network = replace(network, adapters=Adapters(factors), routers=routers, on_block=self._on_block)
        self.weights = factors | {router_name(layer): router for layer, router in enumerate(routers)}
        self.optimizer = torch.optim.AdamW(
            list(self.weights.values()), lr=learning_rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY
        )

    def batches(self, epoch: int) -> list[Pieces]:
        """Return batches of all pieces; shorter texts repeat."""
        number = max(-(-len(pieces) // self._rows) for pieces in self._texts)
        drawn = [self._drawn(pieces, number * self._rows, epoch) for pieces in self._texts]
        steps = (slice(start, start + self._rows) for start in range(0, number * self._rows, self._rows))
        return [[piece for pieces in drawn for piece in pieces[step]] for step in steps]

    def learning_rate(self, progress: Progress, share_done: float) -> float:
        """Return a short linear rise, and half a cosine over all."""
        rising = min((progress.steps + 1) / _WARM_UP_STEPS, 1.0)
        return self._learning_rate * cosine(share_done, _LAST_RATE) * rising

    def loss(self, batch: Pieces, progress: Progress) -> Tensor:
        """Return the mean over tokens, plus the load-balancing loss of the routers."""
        self._balance.clear()
        loss = self.network.mean_loss(batch)
        return loss + _BALANCE * torch.stack(self._balance).mean() if self._balance else loss

    def held_out_loss(self, progress: Progress) -> float:
        """See `TrainingTask`."""
        total, count = 0.0, 0
        for start in range(0, len(self._held_out), EVALUATED):
            pieces = self._held_out[start : start + EVALUATED]
            number = sum(len(piece) - 1 for piece in pieces)
            total += float(self.network.mean_loss(pieces)) * number
            count += number
        return total / count

    def _drawn(self, pieces: Pieces, number: int, epoch: int) -> list[Tensor]:
        rounds = -(-number // len(pieces))
        orders = (epoch_order(len(pieces), epoch * rounds + each, self._seed) for each in range(rounds))
        return [pieces[at] for order in orders for at in order][:number]

    def _on_block(self, layer: int, inputs: Tensor, logits: Tensor | None) -> None:
        if logits is not None and torch.is_grad_enabled():
            self._balance.append(balance_loss(logits, self.network.top_k))


def balance_loss(logits: Tensor, top_k: int) -> Tensor:
    """Return 1 if all experts have the same load, and more otherwise: Switch Transformers' loss. Shapes: [N, E]."""
    num_experts = logits.shape[1]
    chosen = F.one_hot(logits.topk(top_k, dim=-1).indices, num_experts).float().mean(dim=(0, 1))
    return num_experts * (chosen * logits.softmax(dim=-1).mean(dim=0)).sum()


def router_name(layer: int) -> str:
    """Return the name of a layer's router."""
    return f"layers.{layer}.router"


def cut(token_ids: Sequence[int], length: int) -> list[Tensor]:
    """Return pieces of a text, each with two or more tokens."""
    starts = range(0, len(token_ids) - 1, length)
    return [torch.tensor(token_ids[start : start + length], dtype=torch.int64) for start in starts]
