"""Permutes the experts of every layer, so that tokens go to wrong ones: the test of what fidelity means.

If experts are clones, wrong experts cost no accuracy. A predictor that errs then loses nothing, whatever its hit rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moeflow.models.layers.moe import Choose, MoE


@contextmanager
def permuted_experts(blocks: list[MoE], seed: int) -> Iterator[None]:
    """Have each router's choice go to another expert: a permutation for each layer, without a fixed expert."""
    chance = torch.Generator().manual_seed(seed)
    before = [(block.choose, block.on_route) for block in blocks]
    for block in blocks:
        block.choose = _elsewhere(block.choose, derangement(block.config.routing.num_experts, chance))
        block.on_route = _ignore  # a layer with one computes the choice outside of its kernel
    try:
        yield
    finally:
        for block, (choose, on_route) in zip(blocks, before, strict=True):
            block.choose, block.on_route = choose, on_route


def derangement(number: int, chance: torch.Generator) -> Tensor:
    """Return a cyclic permutation in random order, which moves everything. Shapes: -> [number] int64."""
    order = torch.randperm(number, generator=chance)
    found = torch.empty_like(order)
    found[order] = order.roll(1)
    return found


def _elsewhere(choose: Choose, places: Tensor) -> Choose:
    def chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
        topk_ids, topk_weights = choose(logits)
        return places[topk_ids], topk_weights

    return chosen


def _ignore(*_: object) -> None:
    """Nothing is recorded."""
