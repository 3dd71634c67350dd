"""Arrays as arguments of the CPU extension, which sees addresses and no shapes."""

from __future__ import annotations

from typing import Any

from moeflow.kernels.arrays import Array, address, dtype_name, is_contiguous, is_float32, is_int64, is_numpy


def floats(array: Array | None, *shape: int) -> int:
    """Return the address of an array; 0: there is none.

    Raises: ValueError unless it is contiguous float32 of this shape.
    """
    if array is not None and (not is_float32(array) or array.shape != shape or not is_contiguous(array)):
        raise ValueError(f"contiguous float32 {list(shape)} is needed, not {describe(array)}")
    return address(array)


def ids(topk_ids: Array) -> int:
    """Return the address of experts' numbers. Raises: ValueError unless they are contiguous int64."""
    if not is_int64(topk_ids) or not is_contiguous(topk_ids):
        raise ValueError(f"topk_ids must be contiguous int64, not {describe(topk_ids)}")
    return address(topk_ids)


def describe(array: Any) -> str:
    """Write for messages what an array is."""
    strides = [it // array.itemsize for it in array.strides] if is_numpy(array) else list(array.stride())
    name = f"{dtype_name(array.dtype)} {list(array.shape)}"
    return name + ("" if is_contiguous(array) else f" with strides {strides}")
