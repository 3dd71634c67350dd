"""This machine with an emulated device: speeds of the description, and of this machine where that names none.

An emulated device computes and copies in main memory, then waits. So nothing is faster than on this machine, and each
task takes Python's time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeflow.core.hardware import DEVICE, RAM, Link, LinkRate, Machine, MemoryLevel, Processor
from moeflow.core.offload_config import EmulatedDeviceConfig
from moeflow.planner.costs.roofline import processor_of

_COPY_SHARE: Final = 0.5  # of the speed of reading: each byte is also written
_PYTHON_S: Final = 2e-4  # of a transfer or a kernel of a pipeline, usual for cores of 3 to 4 GHz
_TRANSFERS: Final = tuple(1 << bits for bits in range(10, 31, 2))  # bytes


def with_emulated_device(machine: Machine, device: EmulatedDeviceConfig) -> Machine:
    """Return a machine with the levels and links of an emulated device."""
    speeds, ram = device.speeds, machine.level(RAM)
    on_device = _paced(ram, speeds.device_bytes, speeds.device_flops)
    on_device = replace(on_device, name=DEVICE, capacity_bytes=device.capacity_bytes)
    paced = {RAM: _paced(ram, speeds.host_bytes, speeds.host_flops)}
    bytes_per_s = min(speeds.link, _COPY_SHARE * ram.read_bytes_per_s)
    rates = tuple(
        LinkRate(transfer_bytes=size, bytes_per_s=size / (size / bytes_per_s + _PYTHON_S)) for size in _TRANSFERS
    )
    links = (Link(source=source, target=target, rates=rates) for source, target in ((RAM, DEVICE), (DEVICE, RAM)))
    return replace(
        machine,
        levels=(*(paced.get(level.name, level) for level in machine.levels), on_device),
        links=(*machine.links, *links),
        num_devices=1,
    )


def _paced(level: MemoryLevel, bytes_per_s: float, flops_per_s: float) -> MemoryLevel:
    """Return a level that reads and computes at most so fast; 0: as fast as it is."""
    processor = replace(processor_of(level), launch_s=_PYTHON_S)
    if not (bytes_per_s and flops_per_s):
        return replace(level, processor=processor)
    peaks = tuple((dtype, min(peak, flops_per_s)) for dtype, peak in processor.peak_flops_per_s)
    return replace(
        level,
        read_bytes_per_s=min(level.read_bytes_per_s, bytes_per_s),
        processor=Processor(name=processor.name, peak_flops_per_s=peaks, launch_s=_PYTHON_S),
    )
