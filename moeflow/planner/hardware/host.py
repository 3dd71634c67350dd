"""What this machine offers: cores, memory, accelerator. Read when asked, never at import."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from moeflow.kernels.on_demand import torch
from moeflow.planner.costs.process_memory import resident_bytes

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
GPU_DRIVERS = ("nvidia*", "nvgpu*", "nvhost-gpu", "kfd", "dxg")  # in /dev: NVIDIA's, AMD's, WSL's
CGROUP_USAGE = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


@dataclass(frozen=True, slots=True)
class HostResources:
    """Resources of this machine that an engine may use."""

    num_cores: int  # this process may run on; hyper-threads counted once where the system tells
    total_bytes: int
    available_bytes: int  # without swapping, and within the container's limit
    accelerator: str | None  # torch device name
    accelerator_free_bytes: int
    process_bytes: int = 0  # this process holds already


def host_resources() -> HostResources:
    """Return what the machine offers now."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, usage = _first_number(CGROUP_LIMITS), _first_number(CGROUP_USAGE)
    if limit is not None and limit < total:
        total = limit
        available = min(available, limit - (usage or 0))
    accelerator, free = None, 0
    if has_gpu_driver() and torch.cuda.is_available():
        accelerator = "cuda"
        free = torch.cuda.mem_get_info()[0]
    held = resident_bytes([os.getpid()])
    return HostResources(_num_cores(), total, max(available, 0), accelerator, free, held)


def has_gpu_driver() -> bool:
    """Return whether torch, which takes a second to import, is worth asking for a GPU."""
    if sys.platform != "linux":
        return sys.platform != "darwin"
    return any(True for pattern in GPU_DRIVERS for _ in Path("/dev").glob(pattern))


def _num_cores() -> int:
    """Count the cores this process may use. Two threads of one core share its vector units: no gain."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical))


def _first_number(files: tuple[Path, ...]) -> int | None:
    for file in files:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # another cgroup version, or the word "max"
            continue
    return None
