"""Measures a GPU and its link in a process of its own: a CUDA context would hold memory of the GPU afterwards."""

from __future__ import annotations

import sys
from dataclasses import replace

import msgspec

from moeflow.core.apart import run_apart
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import Link, Machine, MemoryLevel
from moeflow.kernels.on_demand import on_demand, torch

with on_demand(__name__):
    from moeflow.planner.hardware import calibrate_device


class GpuFigures(msgspec.Struct, frozen=True):
    """A GPU, the link to it and the link back."""

    level: MemoryLevel
    there: Link
    back: Link


class _Order(msgspec.Struct, frozen=True):
    name: str
    memory_bytes: int
    sizes: dict[str, int]


def gpu_figures(name: str, memory_bytes: int, **sizes: int) -> GpuFigures:
    """Return a GPU with so much memory to use; `sizes` are those of `measure_device`.

    Blocks: for some seconds. Raises: ConfigError if it does not answer.
    """
    try:
        found = [
            msgspec.json.decode(line, type=GpuFigures)
            for line in run_apart(__name__, msgspec.json.encode(_Order(name, memory_bytes, sizes)))
        ]
    except (OSError, msgspec.DecodeError):
        found = []
    if not found:
        raise ConfigError(f"{name} cannot be measured: `moeflow doctor` shows why. Use --device cpu")
    return found[0]


def with_gpu(machine: Machine, it: GpuFigures) -> Machine:
    """Return a machine with one of its GPUs."""
    return replace(
        machine, levels=(*machine.levels, it.level), links=(*machine.links, it.there, it.back), num_devices=1
    )


def main() -> None:
    """Carry out the order on stdin."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=_Order)
    device = torch.device(order.name)
    figures = GpuFigures(*calibrate_device.measure_device(device, order.memory_bytes, **order.sizes))
    sys.stdout.buffer.write(msgspec.json.encode(figures) + b"\n")


if __name__ == "__main__":
    main()
