"""The Python face of the CPU extension: whether it is there, its threads, and the operations on packed weights.

Activations are float32 throughout. A row's result is the same bits alone and in any batch, at any number of threads.
The extension sees addresses and sizes only: shapes and types are checked here.
"""

from __future__ import annotations

from typing import Final

from moeflow.kernels.arrays import Array, address, floats_like, has_whole_rows, is_float32, row_stride
from moeflow.kernels.cpu.arguments import describe, floats
from moeflow.kernels.cpu.packed_weight import PackedWeight

try:
    import moeflow.kernels._cpu as _cpu
except ImportError as error:
    _WHY_NOT = f"the extension for the CPU is not installed ({error})"
    _ISAS: list[str] = []
else:
    _WHY_NOT = ""
    _ISAS = _cpu.isa_names()

ISAS: Final = tuple(_ISAS)  # of this architecture; each holds those before it


def is_available() -> bool:
    """Return whether the extension is there; without it everything else here fails."""
    return not _WHY_NOT


def why_not() -> str:
    """Return why the extension is not there; empty if it is."""
    return _WHY_NOT


def set_num_threads(num_threads: int) -> None:
    """Compute with this many threads, the calling one included."""
    if num_threads < 1:
        raise ValueError(f"{num_threads} threads cannot compute; at least 1 can")
    _cpu.set_num_threads(num_threads)


def num_threads() -> int:
    """Return the number of threads that compute, the calling one included."""
    count: int = _cpu.num_threads()
    return count


def use_own_threads(num_threads: int) -> None:
    """Have the calling thread compute with this many threads of its own from now on, itself included.

    It then computes in parallel to the other threads, which share one set of threads.
    """
    if num_threads < 1:
        raise ValueError(f"{num_threads} threads cannot compute; at least 1 can")
    _cpu.use_own_threads(num_threads)


def kept_bytes() -> int:
    """Return how much memory of their own kernels keep from call to call: what the largest call took."""
    num_bytes: int = _cpu.kept_bytes()
    return num_bytes


def use_isa(cap: str) -> None:
    """Use the best instruction set of this processor up to `cap`; empty: the best there is.

    Raises: ValueError if `cap` is none of `ISAS`.
    """
    _cpu.use_isa(cap)


def best_isa(cap: str) -> str:
    """Return what `use_isa` would use. Raises: ValueError likewise."""
    name: str = _cpu.best_isa(cap)
    return name


def isa_name() -> str:
    """Return the name of the instruction set in use."""
    name: str = _cpu.isa_name()
    return name


def linear(x: Array, weight: PackedWeight, bias: Array | None = None, residual: Array | None = None) -> Array:
    """Return `x @ weight.T + bias + residual`.

    Shapes: x [T, cols], bias [rows], residual [T, rows] -> [T, rows]; all float32.
    """
    if not is_float32(x) or x.ndim != 2 or x.shape[1] != weight.cols or not has_whole_rows(x):
        raise ValueError(f"{weight} takes rows of {weight.cols} float32 values, not {describe(x)}")
    num_rows = x.shape[0]
    out = floats_like(x, num_rows, weight.rows)
    _cpu.linear(
        weight=weight.handle,
        x=address(x),
        num_rows=num_rows,
        x_stride=row_stride(x),
        bias=floats(bias, weight.rows),
        residual=floats(residual, num_rows, weight.rows),
        out=address(out),
        norm=0,
        eps=0.0,
        subtracts_mean=False,
        norm_bias=0,
    )
    return out
