"""What this machine offers: cores, memory, accelerator. Read when asked, never at import."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import psutil

from moeflow.core.cache_dir import cache_folder
from moeflow.core.control_groups import cpu_quota, memory_room
from moeflow.core.hardware import RAM, Machine
from moeflow.core.offload_config import CUDA, parse_cuda_device
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.costs.process_memory import ENGINE_BYTES, resident_bytes

with on_demand(__name__):
    from moeflow.planner.hardware import gpus

GPU_DRIVERS = ("nvidia*", "nvgpu*", "nvhost-gpu", "kfd", "dxg")  # in /dev: NVIDIA's, AMD's, WSL's


@dataclass(frozen=True, slots=True)
class HostResources:
    """Resources of this machine that an engine may use."""

    num_cores: int  # this process may run on; hyper-threads counted once where the system tells
    total_bytes: int
    available_bytes: int  # without swapping, and within the limits of control groups
    accelerator: str | None  # the GPU that may compute, as torch calls it; None: none
    accelerator_free_bytes: int
    process_bytes: int = 0  # this process holds already
    has_bfloat16: bool = True  # whether that GPU's tensor cores take bfloat16
    why_no_accelerator: str = "torch finds no CUDA device here"
    why_no_kernels: str = ""  # why Triton's kernels do not run on that GPU, and the remedy; empty: they do
    accelerator_identity: str = ""  # of that GPU and its software: measurements are valid for these
    next_free_bytes: tuple[int, ...] = ()  # of the GPUs that follow that one, which ranks may use

    @property
    def accelerators_free_bytes(self) -> Sequence[int]:
        """Free memory of that GPU, and of the GPUs that follow it."""
        return () if self.accelerator is None else (self.accelerator_free_bytes, *self.next_free_bytes)


def host_resources(device: str = "cpu", cache_dir: Path | None = None) -> HostResources:
    """Return what the machine offers now, with the GPU that a device setting is about, if it is about any.

    "auto" is about the GPU with the most free memory, of those with kernels. `cache_dir` remembers which ones have
    them; None: the user's own. Blocks: for some seconds if a GPU's driver is installed.
    """
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    if room := memory_room():
        total, available = min(total, room.limit_bytes), min(available, room.free_bytes)
    held = resident_bytes([os.getpid()])
    here = HostResources(_num_cores(), total, max(available, 0), None, 0, held)
    return (
        here
        if device.split(":")[0] not in ("auto", CUDA) or not has_gpu_driver()
        else _with_gpu(here, device, cache_dir)
    )


def _with_gpu(here: HostResources, device: str, cache_dir: Path | None) -> HostResources:
    """Return the same with the GPU that a device setting is about; without one, with the reason."""
    search = gpus.find_gpus(cache_folder(cache_dir))
    found = search.gpus
    name = None if device == "auto" else parse_cuda_device(device)[0]
    asked = [gpu for gpu in found if name in (None, gpu.name)]
    usable = [gpu for gpu in asked if not gpu.problem]
    if usable:
        best = max(usable, key=lambda gpu: (not gpu.kernels_problem, gpu.free_bytes))
        return replace(
            here,
            accelerator=best.name,
            accelerator_free_bytes=best.free_bytes,
            has_bfloat16=best.has_bfloat16,
            why_no_kernels=best.kernels_problem,
            accelerator_identity=best.identity,
            next_free_bytes=tuple(gpu.free_bytes for gpu in takewhile(_computes, found[found.index(best) + 1 :])),
        )
    if asked:
        return replace(here, why_no_accelerator=f"torch cannot compute on {asked[0].name}: {asked[0].problem}")
    if found:
        return replace(here, why_no_accelerator=f"torch finds only {', '.join(gpu.name for gpu in found)} here")
    return replace(here, why_no_accelerator=search.problem or here.why_no_accelerator)


def _computes(gpu: gpus.Gpu) -> bool:
    return not (gpu.problem or gpu.kernels_problem)


def host_of(machine: Machine, why_no_accelerator: str = "the machine has no GPU") -> HostResources:
    """Return what another machine's processor offers to a process that has yet to start, with this machine's cores."""
    memory_bytes = machine.level(RAM).capacity_bytes
    return replace(
        host_resources(),
        total_bytes=memory_bytes,
        available_bytes=memory_bytes,
        accelerator=None,
        accelerator_free_bytes=0,
        process_bytes=ENGINE_BYTES,
        why_no_accelerator=why_no_accelerator,
    )


def has_gpu_driver() -> bool:
    """Return whether torch, which takes a second to import, is worth asking for a GPU."""
    if sys.platform != "linux":
        return sys.platform != "darwin"
    return any(True for pattern in GPU_DRIVERS for _ in Path("/dev").glob(pattern))


def _num_cores() -> int:
    """Count the cores this process may use: those of its processor set, and no more than a quota pays for."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = num_cores_of(os.sched_getaffinity(0))
    else:
        num_cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    quota = cpu_quota()
    return num_cores if quota is None else max(min(num_cores, round(quota)), 1)


def num_cores_of(processors: Collection[int], root: Path = Path("/")) -> int:
    """Count the cores of processors. Two threads of one core share its vector units: no gain."""
    return len({_siblings(number, root) for number in processors})


def _siblings(number: int, root: Path) -> str:
    """Return what names the core of a processor: the list of its threads, or itself where the system does not tell."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(number)
