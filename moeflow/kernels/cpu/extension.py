"""The Python face of the CPU extension: whether it is there, its threads, and the operations on packed weights.

Activations are float32 throughout. A row's result is the same bits alone and in any batch, at any number of threads.
The extension sees addresses and sizes only: shapes and types are checked here.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from moeflow.kernels.cpu.arguments import address, describe
from moeflow.kernels.cpu.packed_weights import PackedWeight

try:
    import moeflow.kernels._cpu as _cpu
except ImportError as error:
    _WHY_NOT = f"the extension for the CPU is not installed ({error})"
else:
    _WHY_NOT = ""

ISAS: Final = ("generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16")  # each holds those before it


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

    It computes beside the other threads then, which take turns with one set of threads.
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


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias + residual`.

    Shapes: x [T, cols], bias [rows], residual [T, rows] -> [T, rows]; all float32.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != weight.cols or x.stride(1) != 1:
        raise ValueError(f"{weight} takes rows of {weight.cols} float32 values, not {describe(x)}")
    num_rows = x.shape[0]
    if bias is not None:
        _check(bias, (weight.rows,), "bias")
    if residual is not None:
        _check(residual, (num_rows, weight.rows), "residual")
    out = torch.empty(num_rows, weight.rows)
    _cpu.linear(
        weight=weight.handle,
        x=x.data_ptr(),
        num_rows=num_rows,
        x_stride=x.stride(0),
        bias=address(bias),
        residual=address(residual),
        out=out.data_ptr(),
        norm=0,
        eps=0.0,
    )
    return out


def _check(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous float32 {list(shape)}, not {describe(tensor)}")
