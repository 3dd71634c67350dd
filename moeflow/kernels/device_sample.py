"""Sampling from logits on a GPU in torch, as `sample_rows` defines it: only the tokens come back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.kernels.device_arrays import on_device
from moeflow.kernels.on_demand import torch
from moeflow.kernels.sample import MIN_WEIGHT, RowSampling

if TYPE_CHECKING:
    from torch import Tensor


def sample_rows(logits: Tensor, samplings: Sequence[RowSampling]) -> list[int]:
    """Return a token for each sampling; -1 if its row has no finite maximum.

    Rows of one kind share a few launches: greedy ones, those in the order of the vocabulary, and sorted ones.
    Shapes: logits [R, V] float32; not changed. Synchronizes once, for the tokens.
    """
    if not samplings:
        return []
    kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
    for place, one in enumerate(samplings):
        is_sorted = one.top_k > 0 or one.top_p < 1.0
        kinds[0 if one.temperature == 0.0 else 2 if is_sorted else 1].append(place)
    order = [place for places in kinds for place in places]
    table = on_device([[_numbers(samplings[place]) for place in order]], logits.device, "float64")[0]
    parts = torch.split(table, [len(places) for places in kinds])
    is_whole = [samplings[place].row for place in order] == list(range(len(logits)))
    chosen = [
        choose(logits if is_whole and len(part) == len(logits) else logits[part[:, 0].long()], part)
        for choose, part in zip((_greedy, _in_order, _sorted), parts, strict=True)
        if len(part)
    ]
    tokens = dict(zip(order, torch.cat(chosen).tolist(), strict=True))
    return [tokens[place] for place in range(len(samplings))]


def _numbers(one: RowSampling) -> tuple[float, ...]:
    inverse = 1.0 / one.temperature if one.temperature else 0.0
    return (one.row, inverse, one.top_k, one.top_p, one.min_p, one.number)


def _greedy(logits: Tensor, table: Tensor) -> Tensor:
    largest, tokens = logits.max(dim=-1)
    return torch.where(largest.isfinite(), tokens, -1)


def _in_order(logits: Tensor, table: Tensor) -> Tensor:
    """Sample by temperature and min-p alone: tokens count in the order of the vocabulary."""
    largest, weights = _weights(logits, table)
    weights = weights.masked_fill(weights < _least(table), 0.0)
    return torch.where(largest.isfinite(), _invert(weights, table), -1)


def _sorted(logits: Tensor, table: Tensor) -> Tensor:
    """Sample from the likeliest tokens, highest first, of equals the lower number."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    largest, weights = _weights(ranked, table)
    top_k, top_p = table[:, 2:3], table[:, 3:4]
    ranks = torch.arange(weights.shape[1], device=weights.device)
    weights = weights.masked_fill((top_k > 0) & (ranks >= top_k), 0.0)
    before = weights.cumsum(dim=-1) - weights
    is_outside = (weights < _least(table)) | ((top_p < 1.0) & (before >= top_p * weights.sum(dim=-1, keepdim=True)))
    weights = weights.masked_fill(is_outside & (ranks > 0), 0.0)
    tokens = order.gather(1, _invert(weights, table).unsqueeze(1)).squeeze(1)
    return torch.where(largest.isfinite(), tokens, -1)


def _weights(logits: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, and what tokens weigh relative to it, [n, V] float64."""
    largest = logits.amax(dim=-1)
    scores = (logits - largest.unsqueeze(1)) * table[:, 1:2].float()
    return largest, scores.exp().double()


def _least(table: Tensor) -> Tensor:
    return table[:, 4:5].clamp(min=MIN_WEIGHT)


def _invert(weights: Tensor, table: Tensor) -> Tensor:
    """Return where the cumulative weight first exceeds the number's share. Shapes: weights [n, V] -> [n]."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    below = torch.nextafter(total, torch.zeros_like(total))  # however the product rounds
    found = torch.searchsorted(cumulative, torch.minimum(table[:, 5:6] * total, below), right=True)
    return found.squeeze(1).clamp(max=weights.shape[1] - 1)
