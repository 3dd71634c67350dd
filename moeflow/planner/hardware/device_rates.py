"""The speeds on which sharing experts between a GPU and the CPU depends, as texts for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moeflow.core.hardware import RAM, Link, Machine
from moeflow.core.units import format_bytes
from moeflow.planner.costs.model_costs import KernelWork, bits_per_value
from moeflow.planner.costs.roofline import processor_of, work_seconds
from moeflow.planner.hardware.gpu_figures import GpuFigures

_EXPERT_VALUES: Final = 3 * 2048 * 768  # of an expert whose rate is told, as Qwen3-30B-A3B has them


def hybrid_rates(machine: Machine, cpu_format: str) -> str:
    """Return all rates of a machine with a GPU by which experts are shared; the CPU has them in `cpu_format`."""
    computes, copies, seam = device_rates(GpuFigures.of(machine))
    return f"GPU: {computes}; link: {copies}; round trip: {seam}; CPU: {expert_rates(machine, [cpu_format])}"


def device_rates(figures: GpuFigures) -> tuple[str, str, str]:
    """Return the rates of a GPU, of the link to it, and of the way to the CPU and back."""
    level, there, back = figures.level, figures.there, figures.back
    gpu = processor_of(level)
    computes = (
        f"reads {level.read_bytes_per_s / 1e9:.0f} GB/s, {gpu.peak('bfloat16') / 1e12:.0f} TFLOP/s in bfloat16, "
        f"a kernel each {_micro(gpu.launch_s)}"
    )
    sizes = sorted({rate.transfer_bytes for link in (there, back) for rate in link.rates})
    pieces = "" if len(sizes) == 1 else f" ({format_bytes(sizes[0])} at a time: {_both(there, back, sizes[0])})"
    copies = f"{_both(there, back, sizes[-1])}{pieces}"
    return computes, copies, f"{_micro(gpu.seam_s)} to the CPU and back, in each layer whose experts both compute"


def expert_rates(machine: Machine, formats: Iterable[str] = ()) -> str:
    """Return how fast the CPU reads the experts of one token, in some formats or in all that were measured."""
    level = machine.level(RAM)
    measured = (it.dtype for it in processor_of(level).efficiencies if it.kernel == "experts")
    names = tuple(formats) or tuple(dict.fromkeys(measured))
    rates = ", ".join(f"{name} {_read_bytes_per_s(machine, name) / 1e9:.3g}" for name in names)
    return f"reads one token's experts in {rates} GB/s" if rates else ""


def _read_bytes_per_s(machine: Machine, name: str) -> float:
    num_bytes = _EXPERT_VALUES * bits_per_value(name) / 8
    work = KernelWork("experts", name, num_bytes, 2.0 * _EXPERT_VALUES, 1, _EXPERT_VALUES)
    return num_bytes / work_seconds(machine.level(RAM), work)


def _both(there: Link, back: Link, transfer_bytes: int) -> str:
    rates = (link.bytes_per_s(transfer_bytes) / 1e9 for link in (there, back))
    return "{:.1f} GB/s there, {:.1f} back".format(*rates)


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
