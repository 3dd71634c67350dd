"""Examples of a training: their split, their order, and the tokens that occur in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def hold_out(items: Sequence[Item], every: int) -> tuple[list[Item], list[Item]]:
    """Return the items to learn from, and each `every`-th one, or the last of fewer items."""
    every = min(every, len(items))
    return [item for place, item in enumerate(items) if (place + 1) % every], list(items[every - 1 :: every])


def epoch_order(number: int, epoch: int, seed: int) -> list[int]:
    """Return the order of so many examples in an epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(number, generator=generator).tolist()


def used_rows(token_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that occur, sorted, and the place of each among them. Shapes: -> [v], [num_rows] int64."""
    used = torch.unique(token_ids)
    places = torch.zeros(num_rows, dtype=torch.int64)
    places[used] = torch.arange(len(used))
    return used, places
