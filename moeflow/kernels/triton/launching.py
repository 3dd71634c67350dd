"""Which tensors the Triton kernels take, and how a kernel starts."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np

Grid: TypeAlias = tuple[int, ...]


def accepts(x: Any) -> bool:
    """Return whether Triton kernels compute with an array: it is on an NVIDIA GPU, and Triton is installed."""
    return not isinstance(x, np.ndarray) and bool(x.is_cuda) and _has_triton()


def launch(kernel: Any, grid: Grid, *arguments: Any, **constants: Any) -> None:
    """Start a kernel with so many programs along each axis, on the current stream of the tensors' device."""
    kernel[grid](*arguments, **constants)


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
