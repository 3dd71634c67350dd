"""Tensors as arguments of the CPU extension, which sees addresses and no shapes."""

from __future__ import annotations

import torch
from torch import Tensor


def check_floats(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor is contiguous float32 of this shape."""
    if tensor.dtype is not torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"contiguous float32 {list(shape)} is needed, not {describe(tensor)}")


def check_ids(topk_ids: Tensor) -> None:
    """Raise ValueError unless experts' numbers are contiguous int64."""
    if topk_ids.dtype is not torch.int64 or not topk_ids.is_contiguous():
        raise ValueError(f"topk_ids must be contiguous int64, not {describe(topk_ids)}")


def address(tensor: Tensor | None) -> int:
    """Return where a tensor lies; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def describe(tensor: Tensor) -> str:
    """Write for messages what a tensor is."""
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {list(tensor.shape)}" + ("" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}")
