"""Which tensors the Triton kernels take, and how a kernel starts."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from moeflow.kernels.on_demand import torch

Grid: TypeAlias = tuple[int, ...]


def accepts(x: Any) -> bool:
    """Return whether Triton kernels compute with an array: it is on an NVIDIA GPU, and Triton is installed."""
    return not isinstance(x, np.ndarray) and bool(x.is_cuda) and _has_triton()


def launch(kernel: Any, grid: Grid, *arguments: Any, **constants: Any) -> None:
    """Start a kernel with so many programs along each axis, on the current stream of the first argument's device.

    Triton itself starts kernels on the thread's current GPU, wherever the tensors are.
    """
    device = arguments[0].device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **constants)
        return
    with torch.cuda.device(device):
        kernel[grid](*arguments, **constants)


class GPU(NamedTuple):
    """Facts of a device that sizes of tiles and grids depend on."""

    capability: int  # 90: 9.0
    num_multiprocessors: int


def gpu_of(x: Any) -> GPU:
    """Return the GPU that a tensor is on; for Triton's interpreter, one that runs a program at a time."""
    return _gpu(x.device.index) if x.device.type == "cuda" else GPU(90, 1)


@functools.cache
def _gpu(index: int) -> GPU:
    found = torch.cuda.get_device_properties(index)
    return GPU(10 * found.major + found.minor, found.multi_processor_count)


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
