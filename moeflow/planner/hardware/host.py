"""What this machine offers: cores, memory, accelerator. Read when asked, never at import."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from moeflow.core.control_groups import cpu_quota, memory_room
from moeflow.core.hardware import RAM, Machine
from moeflow.kernels.on_demand import torch
from moeflow.planner.costs.process_memory import ENGINE_BYTES, resident_bytes

GPU_DRIVERS = ("nvidia*", "nvgpu*", "nvhost-gpu", "kfd", "dxg")  # in /dev: NVIDIA's, AMD's, WSL's


@dataclass(frozen=True, slots=True)
class HostResources:
    """Resources of this machine that an engine may use."""

    num_cores: int  # this process may run on; hyper-threads counted once where the system tells
    total_bytes: int
    available_bytes: int  # without swapping, and within the limits of control groups
    accelerator: str | None  # torch device name
    accelerator_free_bytes: int
    process_bytes: int = 0  # this process holds already


def host_resources() -> HostResources:
    """Return what the machine offers now."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    if room := memory_room():
        total, available = min(total, room.limit_bytes), min(available, room.free_bytes)
    accelerator, free = None, 0
    if has_gpu_driver() and torch.cuda.is_available():
        accelerator = "cuda"
        free = torch.cuda.mem_get_info()[0]
    held = resident_bytes([os.getpid()])
    return HostResources(_num_cores(), total, max(available, 0), accelerator, free, held)


def host_of(machine: Machine) -> HostResources:
    """Return what another machine offers to a process that has yet to start. Cores are those of this machine."""
    memory_bytes = machine.level(RAM).capacity_bytes
    return replace(
        host_resources(),
        total_bytes=memory_bytes,
        available_bytes=memory_bytes,
        accelerator=None,
        accelerator_free_bytes=0,
        process_bytes=ENGINE_BYTES,
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
