"""Which tensors the Triton kernels take, and how a kernel starts."""

from __future__ import annotations

import functools
import logging
from subprocess import CalledProcessError
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from moeflow.kernels.on_demand import on_demand, torch

with on_demand(__name__):
    from moeflow.kernels.triton import trial

logger = logging.getLogger(__name__)

_INSTALL: Final = "install the torch and Triton that fit together (pip install --upgrade 'moeflow[cuda]')"
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
    """Return whether Triton works on a GPU."""
    problem = why_not(torch.device("cuda", index))
    if problem:
        logger.warning("cuda:%d computes without Triton's kernels, which is slower: %s", index, problem)
    return not problem


def why_not(device: torch.device) -> str:
    """Return why Triton's kernels do not run on a device, and the remedy; empty: they do. Synchronizes."""
    if torch.version.hip is not None:  # less shared memory than sizes of tiles need
        return "they are for NVIDIA GPUs"
    try:
        x = torch.eye(_TRIED_SIZE, dtype=torch.float16, device=device).flip(0)
        out = torch.zeros_like(x)
        launch(trial.square_kernel, (1,), x, out, _TRIED_SIZE)
        has_squared = torch.equal(out, x @ x)
    except Exception as error:  # of Triton, its compilers, or files
        return f"{str(error).strip().partition(chr(10))[0] or type(error).__name__}; {_remedy(error)}"
    return "" if has_squared else f"a trial gives wrong results; {_INSTALL}"


def _remedy(error: Exception) -> str:
    """Return what helps against an error of a trial: a compiler, headers, a folder to write, or the right versions."""
    if "C compiler" in str(error):
        return "install gcc"
    if isinstance(error, CalledProcessError):  # of the C compiler
        return "install gcc and Python's headers (python3-dev)"
    if isinstance(error, PermissionError):
        return "set TRITON_CACHE_DIR to a folder that can be written"
    return _INSTALL
