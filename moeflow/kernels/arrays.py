"""Arrays of numbers, NumPy's or torch's: functions of this module take either, and return the same kind.

Where all weights are packed for the CPU kernels these are NumPy's, and torch is not even imported. A *device* selects
the kind of new ones: one of torch, or None for NumPy's in main memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.on_demand import on_demand, torch

try:
    from moeflow.kernels._cpu import address_of
except ImportError:  # nothing asks then, but for what would be quick enough without

    def address_of(x: NDArray[Any]) -> int:
        """Return where an array lies."""
        found: int = x.__array_interface__["data"][0]
        return found


with on_demand(__name__):
    from moeflow.kernels import device_arrays

if TYPE_CHECKING:  # type-checked as torch's: NumPy's arrays have the same methods, apart from functions of this module
    Array: TypeAlias = torch.Tensor
    DType: TypeAlias = torch.dtype
    Device: TypeAlias = torch.device | str | None
else:
    Array = Any

A = TypeVar("A")  # of arrays

FLOAT32: Final[Any] = np.dtype(np.float32)
_INT64: Final[Any] = np.dtype(np.int64)


def is_numpy(x: Any) -> bool:
    """Return whether an array is NumPy's."""
    return isinstance(x, np.ndarray)


def dtype_name(dtype: Any) -> str:
    """Return the name of a type of numbers, the same for either kind: "float32"; of a name itself."""
    return str(dtype).removeprefix("torch.")


def dtype_on(name: str, device: Device) -> Any:
    """Return the type of numbers of this name for arrays on a device; NumPy has no bfloat16."""
    if device is None:
        return np.dtype(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def is_contiguous(x: Any) -> bool:
    """Return whether the numbers lie in a row."""
    return bool(x.flags.c_contiguous) if isinstance(x, np.ndarray) else x.is_contiguous()


def is_float32(x: Any) -> bool:
    """Return whether the numbers are float32."""
    # torch's only floats of four bytes: faster than to ask torch for its name of them
    dtype = x.dtype
    return bool(dtype == FLOAT32 if isinstance(x, np.ndarray) else dtype.itemsize == 4 and dtype.is_floating_point)


def is_int64(x: Any) -> bool:
    """Return whether the numbers are int64."""
    dtype = x.dtype
    return bool(dtype == _INT64 if isinstance(x, np.ndarray) else dtype is torch.int64)


def is_in_main_memory(x: Any) -> bool:
    """Return whether the processor can read the numbers."""
    return isinstance(x, np.ndarray) or x.is_cpu


def address(x: Any | None) -> int:
    """Return where an array in main memory lies; 0 if there is none."""
    if x is None:
        return 0
    found: int = address_of(x) if isinstance(x, np.ndarray) else x.data_ptr()
    return found


def has_whole_rows(x: Any) -> bool:
    """Return whether the numbers of each row of a matrix lie in a row."""
    return bool(x.strides[1] == x.itemsize if isinstance(x, np.ndarray) else x.stride(1) == 1)


def row_stride(x: Any) -> int:
    """Return how many numbers lie between the beginnings of two rows."""
    stride: int = x.strides[0] // x.itemsize if isinstance(x, np.ndarray) else x.stride(0)
    return stride


def floats_like(x: A, *shape: int) -> A:
    """Return float32 numbers of the kind of `x` in main memory, not set to anything."""
    return cast(A, np.empty(shape, FLOAT32) if isinstance(x, np.ndarray) else torch.empty(shape, dtype=torch.float32))


def ids_like(x: A, *shape: int) -> A:
    """Return int64 numbers of the kind of `x` in main memory, not set to anything."""
    return cast(A, np.empty(shape, np.int64) if isinstance(x, np.ndarray) else torch.empty(shape, dtype=torch.int64))


def floats_on(device: Device, *shape: int) -> Array:
    """Return float32 numbers on a device, not set to anything."""
    if device is None:
        return cast("Array", np.empty(shape, FLOAT32))
    return torch.empty(shape, dtype=torch.float32, device=device)


def ids_on(values: Sequence[int], device: Device) -> Array:
    """Return int64 numbers on a device; the host does not wait for a GPU."""
    if device is None:
        return cast("Array", np.array(values, np.int64))
    device = torch.device(device)
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    return device_arrays.on_device([values], device)[0]


def floats(x: Array) -> Array:
    """Return the numbers as float32; as they are, if they are."""
    if is_float32(x):
        return x
    return x.float()


def copied(x: A) -> A:
    """Return a copy of the numbers."""
    return cast(A, x.copy() if isinstance(x, np.ndarray) else cast("torch.Tensor", x).clone())


def copy_into(destination: Any, source: Any) -> None:
    """Write the numbers of a tensor over those of an array of its shape."""
    if isinstance(destination, np.ndarray):
        destination[...] = on_host(source)
    else:
        destination.copy_(source)


def zeros_like(x: A, *shape: int) -> A:
    """Return float32 zeros of the kind of `x` in main memory."""
    return cast(A, np.zeros(shape, FLOAT32) if isinstance(x, np.ndarray) else torch.zeros(shape, dtype=torch.float32))


def contiguous(x: Any) -> Any:
    """Return the numbers in a row: as they are, if they lie so."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def stack(parts: Sequence[A]) -> A:
    """Return arrays of one shape as one, with a dimension more."""
    several: Any = list(parts)
    return cast(A, np.stack(several) if isinstance(parts[0], np.ndarray) else torch.stack(several))


def array_on(x: NDArray[Any], device: Device) -> Array:
    """Return the numbers on a device: a view in main memory, else a copy."""
    if device is None:
        return cast("Array", x)
    device = torch.device(device)
    return torch.from_numpy(x) if device.type == "cpu" else device_arrays.staged([x], device)[0]


def shape_alone(shape: Sequence[int]) -> Array:
    """Return an array of that shape which takes no memory, and can be cut into parts: all its numbers are one."""
    return cast("Array", np.broadcast_to(np.zeros((), FLOAT32), shape))


def rows_of(x: Array, rows: list[int]) -> Array:
    """Return some rows, ascending: if it is all of them, as they are."""
    return x if len(rows) == x.shape[0] else x[ids_on(rows, None if is_numpy(x) else x.device)]


def split(x: A, sizes: Sequence[int], dim: int = 0) -> Sequence[A]:
    """Return the parts, of so many rows each, as views."""
    if isinstance(x, np.ndarray):
        return cast("Sequence[A]", np.split(x, list(accumulate(sizes))[:-1], axis=dim))
    return cast("Sequence[A]", torch.split(cast("torch.Tensor", x), list(sizes), dim=dim))


def on_host(x: Any) -> NDArray[Any]:
    """Return the numbers as NumPy's: a view if they are in main memory, else a copy. bfloat16 is widened."""
    if isinstance(x, np.ndarray):
        return x
    if x.dtype is torch.bfloat16:
        x = x.float()
    found: NDArray[Any] = x.cpu().numpy()
    return found


def as_tensor(x: Any) -> torch.Tensor:
    """Return the numbers as torch's, where nothing else will do: a view. Imports torch."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x
