"""What a rank's tokens get of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Result:
    """What a rank's tokens get."""

    sums: Tensor  # [T, H]
    is_kept: Tensor | None = None  # [T, K] bool: whether a choice was computed; None: all were
