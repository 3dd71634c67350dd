"""Splits examples into those to learn from and those to measure with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def hold_out(items: Sequence[Item], every: int) -> tuple[list[Item], list[Item]]:
    """Return the items to learn from, and each `every`-th one, or the last of fewer items."""
    every = min(every, len(items))
    return [item for place, item in enumerate(items) if (place + 1) % every], list(items[every - 1 :: every])
