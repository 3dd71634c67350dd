"""This machine with a device that it plays: what plans for `--device emulated:...` reckon with.

Such a device is a pace: work takes as long as its speeds say, or as this machine's processor really needs, whichever
is longer. So the shares of the roofs that were measured here become shares of the slower roofs.
"""

from __future__ import annotations

from dataclasses import replace

from moeflow.core.hardware import (
    DEVICE,
    DISK,
    PINNED,
    RAM,
    KernelEfficiency,
    Link,
    LinkRate,
    Machine,
    MemoryLevel,
    Processor,
)
from moeflow.core.offload_config import EmulatedDeviceConfig
from moeflow.planner.model_costs import bits_per_value
from moeflow.planner.roofline import processor_of


def with_emulated_device(host: Machine, device: EmulatedDeviceConfig) -> Machine:
    """Return a host and the device that it plays. Nothing comes from disk there."""
    speeds, ram = device.speeds, host.level(RAM)
    played = replace(ram, name=DEVICE, capacity_bytes=device.capacity_bytes)
    levels = (
        _paced(ram, speeds.host_bytes, speeds.host_flops),
        _paced(played, speeds.device_bytes, speeds.device_flops),
    )
    rates = (LinkRate(transfer_bytes=1, bytes_per_s=speeds.link),)
    links = tuple(Link(source=source, target=target, rates=rates) for source, target in ((RAM, DEVICE), (DEVICE, RAM)))
    kept = tuple(link for link in host.links if not {link.source, link.target} & {DISK, PINNED, DEVICE})
    return replace(host, name=f"{host.name} playing a device", levels=levels, links=(*kept, *links), num_devices=1)


def _paced(level: MemoryLevel, bytes_per_s: float, flops_per_s: float) -> MemoryLevel:
    """Return a level at most so fast; 0: as fast as it is."""
    if not bytes_per_s or not flops_per_s:
        return level
    processor = processor_of(level)
    peaks = tuple((dtype, min(peak, flops_per_s)) for dtype, peak in processor.peak_flops_per_s)
    slower = replace(level, read_bytes_per_s=min(level.read_bytes_per_s, bytes_per_s))
    paced = replace(processor, peak_flops_per_s=peaks)
    shares = tuple(_share(entry, level, slower, processor, paced) for entry in processor.efficiencies)
    return replace(slower, processor=replace(paced, efficiencies=shares))


def _share(
    entry: KernelEfficiency, level: MemoryLevel, slower: MemoryLevel, processor: Processor, paced: Processor
) -> KernelEfficiency:
    """Return the share of the slower roof that a kernel reaches: all of it, where it is fast enough."""
    num_bytes, num_flops = bits_per_value(entry.dtype) / 8, 2.0 * entry.rows  # a value read, and what it is used for

    def roof_s(at: MemoryLevel, computing: Processor) -> float:
        return max(num_bytes / at.read_bytes_per_s, num_flops / computing.peak(entry.dtype))

    asked_s = roof_s(slower, paced)
    return replace(entry, share=asked_s / max(asked_s, roof_s(level, processor) / entry.share))
