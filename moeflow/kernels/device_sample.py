"""Sampling from logits on a GPU in torch, as `sample_rows` defines it: only the tokens come back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from moeflow.kernels.device_arrays import on_device
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

# Row of the logits, temperature, top_k, top_p, min_p and number: the fields of `RowSampling`
Sampling: TypeAlias = tuple[int, float, int, float, float, float]


def sample_rows(logits: Tensor, samplings: Sequence[Sampling], min_weight: float) -> list[int]:
    """Return a token for each sampling; -1 if its row has no finite maximum.

    Tokens that weigh less than `min_weight` times the likeliest are never chosen. Rows of one kind share a few
    launches: greedy ones, rows in the order of the vocabulary, and sorted ones.
    Shapes: logits [R, V] float32; not changed. Synchronizes once, for the tokens.
    """
    if not samplings:
        return []
    kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
    for place, (_, temperature, top_k, top_p, _, _) in enumerate(samplings):
        is_sorted = top_k > 0 or top_p < 1.0
        kinds[0 if temperature == 0.0 else 2 if is_sorted else 1].append(place)
    order = [place for places in kinds for place in places]
    table = on_device([[_numbers(samplings[place], min_weight) for place in order]], logits.device, "float64")[0]
    parts = torch.split(table, [len(places) for places in kinds])
    is_whole = [samplings[place][0] for place in order] == list(range(len(logits)))
    chosen = [
        choose(logits if is_whole and len(part) == len(logits) else logits[part[:, 0].long()], part)
        for choose, part in zip((_greedy, _in_order, _sorted), parts, strict=True)
        if len(part)
    ]
    tokens = dict(zip(order, torch.cat(chosen).tolist(), strict=True))
    return [tokens[place] for place in range(len(samplings))]


def _numbers(one: Sampling, min_weight: float) -> Sampling:
    """Return a row of the table: with the inverse of the temperature, and the least weight in the place of min_p."""
    row, temperature, top_k, top_p, min_p, number = one
    return row, 1.0 / temperature if temperature else 0.0, top_k, top_p, max(min_p, min_weight), number


def _greedy(logits: Tensor, table: Tensor) -> Tensor:
    largest, tokens = logits.max(dim=-1)
    return torch.where(largest.isfinite(), tokens, -1)


def _in_order(logits: Tensor, table: Tensor) -> Tensor:
    """Sample by temperature and min-p alone: tokens count in the order of the vocabulary."""
    largest, weights = _weights(logits, table)
    weights = weights.masked_fill(weights < table[:, 4:5], 0.0)
    return torch.where(largest.isfinite(), _invert(weights, table), -1)


def _sorted(logits: Tensor, table: Tensor) -> Tensor:
    """Sample from the likeliest tokens, highest first, of equals the lower number."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    largest, weights = _weights(ranked, table)
    top_k, top_p = table[:, 2:3], table[:, 3:4]
    ranks = torch.arange(weights.shape[1], device=weights.device)
    weights = weights.masked_fill((top_k > 0) & (ranks >= top_k), 0.0)
    before = weights.cumsum(dim=-1) - weights
    is_outside = (weights < table[:, 4:5]) | ((top_p < 1.0) & (before >= top_p * weights.sum(dim=-1, keepdim=True)))
    weights = weights.masked_fill(is_outside & (ranks > 0), 0.0)
    tokens = order.gather(1, _invert(weights, table).unsqueeze(1)).squeeze(1)
    return torch.where(largest.isfinite(), tokens, -1)


def _weights(logits: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, and what tokens weigh relative to it, [n, V] float64."""
    largest = logits.amax(dim=-1)
    scores = (logits - largest.unsqueeze(1)) * table[:, 1:2].float()
    return largest, scores.exp().double()


def _invert(weights: Tensor, table: Tensor) -> Tensor:
    """Return where the cumulative weight first exceeds the number's share. Shapes: weights [n, V] -> [n]."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    below = torch.nextafter(total, torch.zeros_like(total))  # however the product rounds
    found = torch.searchsorted(cumulative, torch.minimum(table[:, 5:6] * total, below), right=True)
    return found.squeeze(1).clamp(max=weights.shape[1] - 1)
