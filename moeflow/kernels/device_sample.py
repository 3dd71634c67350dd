"""Sampling from logits on a GPU, as `sample_rows` defines it. Nothing here waits for the GPU but `fetch`.

To sort all rows of a batch takes longer than some layers: 64 rows of 152,064 tokens are 10 million numbers. So top-k
and top-p look at the likeliest tokens alone, as the host does. Torch sorts all only for a wider nucleus, which is rare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import on_host
from moeflow.kernels.device_arrays import on_device
from moeflow.kernels.on_demand import on_demand, torch

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels.triton import draws, greedy

# Row of the logits, temperature, top_k, top_p, min_p and number: the fields of `RowSampling`
Sampling: TypeAlias = tuple[int, float, int, float, float, float]

_HALF: Final = 1 << 32


class Limits(NamedTuple):
    """Constants of `kernels/sample.py`."""

    min_weight: float  # tokens that weigh less, times the likeliest, are never chosen
    nucleus_width: int  # likeliest tokens that top-p looks at before it sorts a whole row


class Choices(msgspec.Struct, frozen=True):
    """Sampled tokens on a device."""

    tokens: Tensor  # [n] int64; -1: the row has no finite maximum; `draws.WIDE`
    places: list[int]  # of each sampling: where its token is


def sample(
    logits: Tensor,
    samplings: Sequence[Sampling],
    limits: Limits,
    others: Callable[[Choices], list[Tensor]] = lambda _: [],
) -> tuple[list[int], list[NDArray[Any]]]:
    """Return a token for each sampling, -1 if its row has no finite maximum; and the numbers that `others` computes.

    Synchronizes once, or twice if a nucleus is wide. Shapes: logits [R, V] float32; not changed.
    """
    most = max((top_k for _, _, top_k, _, _, _ in samplings), default=0)
    for sorts_all in (most > limits.nucleus_width, True):
        choices = _choose_rows(logits, samplings, limits, sorts_all=sorts_all)
        tokens, *found = fetch([choices.tokens, *others(choices)])
        if not (tokens == draws.WIDE).any():
            break
    return [int(tokens[place]) for place in choices.places], found


def _choose_rows(logits: Tensor, samplings: Sequence[Sampling], limits: Limits, *, sorts_all: bool) -> Choices:
    """Choose a token for each sampling; `sorts_all`: under top-k and top-p, look at all tokens.

    Rows of one kind share launches. Shapes: logits [R, V] float32.
    """
    kinds: tuple[list[int], list[int]] = ([], [])
    for place, (_, temperature, top_k, top_p, _, _) in enumerate(samplings):
        if temperature != 0.0:
            kinds[1 if top_k > 0 or top_p < 1.0 else 0].append(place)
    order = [place for places in kinds for place in places]
    greedy_tokens = [greedy.greedy(logits)] if len(order) < len(samplings) else []
    first = len(logits) if greedy_tokens else 0
    at = dict(zip(order, range(first, first + len(order)), strict=True))
    places = [at.get(place, samplings[place][0]) for place in range(len(samplings))]
    if not order:
        return Choices(greedy_tokens[0], places)
    numbers = [_numbers(samplings[place], limits.min_weight) for place in order]
    table = on_device([numbers], logits.device, "float64")[0]
    num_in_order = len(kinds[0])
    if sorts_all and kinds[1]:
        chosen = [draws.draw(logits, table[:num_in_order], num_in_order, 0)] if num_in_order else []
        chosen.append(_sorted(logits[table[num_in_order:, 0].long()], table[num_in_order:]))
    else:
        chosen = [draws.draw(logits, table, num_in_order, limits.nucleus_width)]
    return Choices(torch.cat([*greedy_tokens, *chosen]), places)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Return each token's log-probability and rank, then the likeliest tokens and their log-probabilities.

    The rank is 1 of the likeliest; of equals the lower number comes first.
    Shapes: logits [n, V] float32, tokens [n] int64 -> [n, 2 + 2 * num_top] float64.
    """
    at = tokens.clamp(min=0).unsqueeze(1)
    chosen = logits.gather(1, at)
    rank = (logits > chosen).sum(dim=1, keepdim=True) + 1
    largest = logits.amax(dim=1, keepdim=True).double()
    total = largest + (logits.double() - largest).exp().sum(dim=1, keepdim=True).log()
    top_tokens, of_top = _likeliest(logits, num_top)
    return torch.cat([chosen - total, rank, top_tokens, of_top - total], dim=1)


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens, of equals first the lower number, and their logits: [n, count] each, or [n, V]."""
    size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # without negative zeros
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = ordered * _HALF + torch.arange(_HALF - 1, _HALF - 1 - size, -1, device=logits.device)
    tokens = (_HALF - 1) - (keys.topk(min(count, size), dim=1).values & (_HALF - 1))
    return tokens, logits.gather(1, tokens)


def fetch(parts: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return the numbers of tensors, all in one copy to the host, as float64 if there are several. Synchronizes."""
    if len(parts) == 1:
        return [on_host(parts[0])]
    flat = on_host(torch.cat([part.double().flatten() for part in parts]))
    bounds = np.cumsum([part.numel() for part in parts])[:-1]
    return [each.reshape(part.shape) for each, part in zip(np.split(flat, bounds), parts, strict=True)]


def _numbers(one: Sampling, min_weight: float) -> Sampling:
    """Return a row of the table: with the inverse of the temperature, and the least weight in the place of min_p."""
    row, temperature, top_k, top_p, min_p, number = one
    return row, 1.0 / temperature, top_k, top_p, max(min_p, min_weight), number


def _sorted(logits: Tensor, table: Tensor) -> Tensor:
    """Sample from all tokens by torch, the likeliest first, of equals the lower number."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    largest = logits.amax(dim=-1)
    weights = ((ranked - largest.unsqueeze(1)) * table[:, 1:2].float()).exp().double()
    top_k, top_p = table[:, 2:3], table[:, 3:4]
    ranks = torch.arange(weights.shape[1], device=weights.device)
    weights = weights.masked_fill((top_k > 0) & (ranks >= top_k), 0.0)
    before = weights.cumsum(dim=-1) - weights
    is_outside = (weights < table[:, 4:5]) | ((top_p < 1.0) & (before >= top_p * weights.sum(dim=-1, keepdim=True)))
    cumulative = weights.masked_fill(is_outside & (ranks > 0), 0.0).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    below = torch.nextafter(total, torch.zeros_like(total))  # however the product rounds
    found = torch.searchsorted(cumulative, torch.minimum(table[:, 5:6] * total, below), right=True)
    tokens = order.gather(1, found.clamp(max=weights.shape[1] - 1)).squeeze(1)
    return torch.where(largest.isfinite(), tokens, -1)
