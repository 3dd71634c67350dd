"""A GPU and its link: measured once, and kept in the cache folder for as long as card, driver, torch and Triton stay.

A process of its own measures, since a CUDA context would hold memory of the GPU afterwards.
"""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from moeflow.core.apart import run_apart
from moeflow.core.cache_dir import cache_folder
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, RAM, Link, Machine, MemoryLevel
from moeflow.core.sha256 import sha256
from moeflow.core.untrusted import UnreadableError, read_bounded
from moeflow.core.whole_file import whole_file
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.planner.hardware.host import HostResources

with on_demand(__name__):
    from moeflow.planner.hardware import calibrate_device


VERSION: Final = 1  # to be raised when measurements change their meaning


class GpuFigures(msgspec.Struct, frozen=True):
    """A GPU, the link to it and the link back."""

    level: MemoryLevel
    there: Link
    back: Link

    @classmethod
    def of(cls, machine: Machine) -> GpuFigures:
        """Return those of a machine with a GPU."""
        return cls(machine.level(DEVICE), machine.link(RAM, DEVICE), machine.link(DEVICE, RAM))


class _Answer(msgspec.Struct, frozen=True):
    figures: GpuFigures | None = None
    problem: str = "the process that measures ended early"  # without figures


class _Order(msgspec.Struct, frozen=True):
    name: str
    memory_bytes: int
    sizes: dict[str, int]


def figures_file(cache_dir: Path | None, here: HostResources, name: str) -> Path:
    """Return where the figures of a GPU of this machine are kept; `cache_dir` None: in the user's own folder."""
    valid_for = sha256(repr((VERSION, platform.node(), here.accelerator_identity, name)).encode()).hexdigest()[:16]
    return cache_folder(cache_dir) / "gpus" / f"{valid_for}.json"


def gpu_figures(name: str, memory_bytes: int, file: Path, *, recalibrate: bool = False, **sizes: int) -> GpuFigures:
    """Return a GPU with so much memory to use, as `file` has it; measures it if there is no such file.

    `sizes` are those of `measure_device`. Measures in any case if `recalibrate`.
    Blocks: for some seconds if it measures. Raises: ConfigError if the GPU does not answer.
    """
    figures = None if recalibrate else known_figures(file)
    if figures is None:
        figures = _measured(_Order(name, memory_bytes, sizes))
        with suppress(OSError):  # measured again at the next start
            _save(figures, file)
    return msgspec.structs.replace(figures, level=replace(figures.level, capacity_bytes=memory_bytes))


def known_figures(file: Path) -> GpuFigures | None:
    """Return the kept figures; None if there are none, or none that can be read."""
    try:
        return msgspec.json.decode(read_bounded(file), type=GpuFigures)
    except (UnreadableError, msgspec.DecodeError):
        return None


def _save(figures: GpuFigures, file: Path) -> None:
    with whole_file(file) as new:
        new.write_bytes(msgspec.json.encode(figures))


def _measured(order: _Order) -> GpuFigures:
    answer = _Answer()
    with suppress(OSError, msgspec.DecodeError):
        for line in run_apart(__name__, msgspec.json.encode(order)):
            answer = msgspec.json.decode(line, type=_Answer)
    if answer.figures is None:
        raise ConfigError(f"{order.name} cannot be measured: {answer.problem}. Use --device cpu")
    return answer.figures


def with_gpu(machine: Machine, it: GpuFigures, number: int = 1) -> Machine:
    """Return a machine with so many GPUs like one of its own, each with a link."""
    links = (replace(link, is_shared=number == 1) for link in (it.there, it.back))
    return replace(machine, levels=(*machine.levels, it.level), links=(*machine.links, *links), num_devices=number)


def main() -> None:
    """Carry out the order on stdin."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=_Order)
    device = torch.device(order.name)
    try:
        answer = _Answer(GpuFigures(*calibrate_device.measure_device(device, order.memory_bytes, **order.sizes)))
    except (RuntimeError, AssertionError) as error:  # torch's: a lack of memory, or a build without CUDA
        answer = _Answer(problem=str(error).partition("\n")[0])
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
