"""Finds this machine's GPUs in a process of its own: asking opens a CUDA context, which holds memory of the GPU.

The process tries each GPU with a small sum, since a torch build has kernels for some generations of GPUs only. Then it
tries Triton's kernels. A success is remembered for these versions of torch, Triton and driver. JSON comes back: a line
before the kernels are tried, and one after that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from moeflow.core.apart import run_apart
from moeflow.core.sha256 import sha256
from moeflow.kernels.on_demand import on_demand, torch

with on_demand(__name__):
    from moeflow.kernels.triton import launching

_BFLOAT16_SINCE = (8, 0)  # compute capability of NVIDIA GPUs whose tensor cores take bfloat16
_TIMEOUT_S: Final = 180.0  # a first import of torch from a slow disk, and Triton's compiler, take tens of seconds
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_NO_GPUS: Final = "No CUDA GPUs are available"  # torch's words where the driver works
_UNTRIED: Final = "the process that tried them ended early"
_CHECK_DRIVER: Final = "if `nvidia-smi` fails too, install the driver again and restart"


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that torch finds."""

    name: str  # as torch calls it
    free_bytes: int = 0
    identity: str = ""  # what findings about it are valid for: the GPU and the versions of its software
    has_bfloat16: bool = True  # in tensor cores
    problem: str = ""  # why torch cannot compute there; empty: it can
    kernels_problem: str = ""  # why Triton's kernels do not run there, and the remedy; empty: they do


class GpuSearch(msgspec.Struct, frozen=True):
    """The GPUs that were found."""

    gpus: list[Gpu]
    problem: str = ""  # why there are none, and the remedy; empty: there are, or nothing is wrong


def find_gpus(cache_dir: Path) -> GpuSearch:
    """Return the GPUs, or why they cannot be found. Blocks: for some seconds."""
    found = GpuSearch([])
    try:
        for line in run_apart(__name__, str(cache_dir.absolute()).encode(), timeout_s=_TIMEOUT_S):
            found = msgspec.json.decode(line, type=GpuSearch)
    except (OSError, msgspec.DecodeError) as error:
        if not found.gpus:
            return GpuSearch([], f"looking for a GPU failed: {error}; {_CHECK_DRIVER}")
        why = f"trying them failed: {error}; {_CHECK_DRIVER}"
        gpus = [msgspec.structs.replace(it, kernels_problem=why if it.kernels_problem else "") for it in found.gpus]
        return GpuSearch(gpus)
    return found


def tried_gpus() -> GpuSearch:
    """Return the GPUs that torch finds, or why it finds none. Opens a context on each."""
    count = torch.cuda.device_count()
    return GpuSearch([_tried(f"cuda:{number}") for number in range(count)], "" if count else _why_none())


def _tried(name: str) -> Gpu:
    try:
        torch.ones(2, device=name).sum().item()
        free_bytes = torch.cuda.mem_get_info(name)[0]
        is_nvidia = torch.version.hip is None
        has_bfloat16 = not is_nvidia or torch.cuda.get_device_capability(name) >= _BFLOAT16_SINCE
    except RuntimeError as error:  # torch's, such as a lack of memory or of kernels for this GPU
        return Gpu(name, problem=str(error).partition("\n")[0])
    return Gpu(name, free_bytes, _identity(torch.device(name)), has_bfloat16)


def _why_none() -> str:
    """Return why torch finds no GPU, and the remedy; empty: it works, and sees none."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "torch is the build for CPUs; for an NVIDIA GPU, pip uninstall -y torch && pip install 'moeflow[cuda]'"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        return "" if why.startswith(_NO_GPUS) else f"{why}; {_CHECK_DRIVER}"
    return ""


def with_kernels(gpu: Gpu, cache_dir: Path) -> Gpu:
    """Return a GPU with the result of trying Triton's kernels there, or of a trial that succeeded before."""
    if gpu.problem:
        return gpu
    file = cache_dir / "gpus" / f"triton-{gpu.identity}"
    problem = "" if file.exists() else launching.why_not(torch.device(gpu.name))
    if not problem:
        with suppress(OSError):  # tried again at the next start
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    return msgspec.structs.replace(gpu, kernels_problem=problem)


def _identity(device: torch.device) -> str:
    """Return a hash of the GPU, and of the versions of Python, torch, Triton and driver."""
    try:
        driver = _DRIVER.read_text()
    except OSError:
        driver = ""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    gpu = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return sha256(repr((gpu, sys.version, torch.__version__, triton, driver)).encode()).hexdigest()[:16]


def main() -> None:
    """Print the GPUs, and those with Triton's kernels tried. stdin names the cache folder."""
    cache_dir = Path(sys.stdin.read())
    with _silent() as descriptor:
        try:
            found = tried_gpus()
            _write(descriptor, GpuSearch([msgspec.structs.replace(it, kernels_problem=_UNTRIED) for it in found.gpus]))
            found = msgspec.structs.replace(found, gpus=[with_kernels(it, cache_dir) for it in found.gpus])
        except Exception as error:  # of torch's import, or of the driver
            found = GpuSearch([], f"looking for a GPU failed: {error}; {_CHECK_DRIVER}")
        _write(descriptor, found)


@contextmanager
def _silent() -> Iterator[int]:
    """Yield the descriptor of stdout; in the block, drivers and compilers write to neither stdout nor stderr."""
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    yield stdout


def _write(descriptor: int, found: GpuSearch) -> None:
    os.write(descriptor, msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    main()
