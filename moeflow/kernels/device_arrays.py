"""Numbers of the host on a GPU, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT_BYTES: Final = 16  # of each array in the copy: kernels load as much at once


def on_device(values: Sequence[Any], device: torch.device | str, dtype: str = "int64") -> list[Tensor]:
    """Return arrays on a device: all in one copy from pinned memory, for which the host does not wait."""
    return staged([np.asarray(each, dtype) for each in values], torch.device(device))


def staged(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[Tensor]:
    """Return the same arrays on a device, each with its own type of numbers, after one copy."""
    return views(pinned_bytes(arrays, device).to(device, non_blocking=True), arrays)


def pinned_bytes(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> Tensor:
    """Return the arrays one behind the other, [n] uint8 in memory that a GPU can read.

    Torch keeps the memory until copies from it are through.
    """
    places, size = _layout(arrays)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    for array, place in zip(arrays, places, strict=True):
        memory[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return host


def views(memory: Tensor, arrays: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
    """Return the arrays' counterparts in memory [n] uint8 that `pinned_bytes` is, or will be, copied to."""
    found = []
    for array, place in zip(arrays, _layout(arrays)[0], strict=True):
        dtype = getattr(torch, str(array.dtype))
        found.append(memory[place : place + array.nbytes].view(dtype).view(array.shape))
    return found


def _layout(arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[list[int], int]:
    """Return where each array begins, and the size of all, in bytes."""
    *places, size = accumulate((-(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for array in arrays), initial=0)
    return places, size
