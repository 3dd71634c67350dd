"""Which tensors the Triton kernels take, and how a kernel starts."""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from moeflow.kernels.on_demand import on_demand, torch

with on_demand(__name__):
    from moeflow.kernels.triton import trial

logger = logging.getLogger(__name__)

_TRIED_SIZE: Final = 16  # the smallest product of tensor cores
Grid: TypeAlias = tuple[int, ...]


def accepts(x: Any) -> bool:
    """Return whether Triton kernels compute with an array: it is on an NVIDIA GPU where Triton works."""
    return not isinstance(x, np.ndarray) and bool(x.is_cuda) and _runs_kernels(x.device.index)


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
def _runs_kernels(index: int) -> bool:
    """Return whether Triton works on a GPU. Sizes of tiles are for NVIDIA's; others have less shared memory."""
    if torch.version.hip is not None or find_spec("triton") is None:
        return False
    problem = why_not(torch.device("cuda", index))
    if problem:
        logger.warning("cuda:%d computes without Triton's kernels, which is slower: %s", index, problem)
    return not problem


def why_not(device: torch.device) -> str:
    """Return why Triton does not work on a device; empty: it does. Synchronizes.

    It needs a C compiler, Python's headers, a folder to write, and support of the GPU.
    """
    x = torch.eye(_TRIED_SIZE, dtype=torch.float16, device=device).flip(0)
    out = torch.zeros_like(x)
    try:
        launch(trial.square_kernel, (1,), x, out, _TRIED_SIZE)
        has_squared = torch.equal(out, x @ x)
    except Exception as error:  # of Triton, its compilers, or files
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return "" if has_squared else "its results are wrong"
