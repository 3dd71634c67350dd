"""Measures in a second what one model's start asks for: memory, arithmetic, its own kernels, and the disk if it counts.

The result is good enough to choose settings, and marked as quick. Where nothing can be measured, assumes figures that
hardly any machine falls short of, and notes that in `sources`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeflow.core.hardware import DISK, RAM, Link, LinkRate, Machine, MemoryLevel, Processor
from moeflow.core.units import MIB
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.costs.roofline import processor_of
from moeflow.planner.hardware.kernel_bench import QUICK, ROW_OPERATIONS, KernelShape, parts_of
from moeflow.planner.hardware.other_work import DISTURBING

if TYPE_CHECKING:
    from moeflow.planner.hardware.calibrate import OnStep

with on_demand(__name__):
    from moeflow.planner.hardware import calibrate, disk_rates

MIN_UNCERTAINTY: Final = 0.35
MAX_ROUNDS: Final = 3  # where others are at work; the calmest counts
ASSUMED_UNCERTAINTY: Final = 2.0
ASSUMED_READ_BYTES_PER_S: Final = 5e9
ASSUMED_FLOPS_PER_S: Final = 2e10  # of a thread, in any format
ASSUMED_EFFICIENCY: Final = 0.5
ASSUMED_PASS_S: Final = 2e-3
ASSUMED_TOKEN_S: Final = 5e-5
ASSUMED_DISK_BYTES_PER_S: Final = 1e8


def measure_quickly(
    known: Machine | None, shapes: Sequence[KernelShape], *, num_threads: int, ram_bytes: int, on_step: OnStep
) -> Machine:
    """Return a machine without a disk; keeps the known figures of one that was measured quickly before.

    Blocks: for a second, three while others are at work. Raises: MemoryError or RuntimeError if memory is too small for
    measuring.
    """
    missing = missing_parts(known, shapes)
    if known is not None and not missing:
        return known
    rounds = calibrate.Rounds(num_threads, QUICK, num_kept=1)
    for _ in range(MAX_ROUNDS):
        rounds.run(missing, on_step, of_kernels_only=known is not None)
        if rounds.other_work < DISTURBING:
            break
    if known is not None:
        known = replace(known, other_work=max(known.other_work, rounds.other_work))
        return calibrate.with_efficiencies(known, rounds.efficiencies())
    machine = rounds.machine("this machine", ram_bytes)
    ram = machine.level(RAM)
    processor = processor_of(ram)
    usual = min(statistics.median(it.share for it in processor.efficiencies), 1.0)  # of formats that were not measured
    ram = replace(ram, processor=replace(processor, default_efficiency=usual))
    return replace(
        machine,
        levels=(ram,),
        uncertainty=max(machine.uncertainty, MIN_UNCERTAINTY),
        sources=(("all", f"measured quickly by moeflow: {num_threads} threads"),),
        is_quick=True,
    )


def missing_parts(known: Machine | None, shapes: Sequence[KernelShape]) -> list[KernelShape]:
    """Return the kernels to measure for shapes."""
    entries = () if known is None else processor_of(known.level(RAM)).efficiencies
    measured = {(it.kernel, it.dtype, it.values) for it in entries}
    wanted = parts_of((*shapes, ROW_OPERATIONS), QUICK)
    return [it for it in wanted if (it.kernel, it.dtype, it.values) not in measured]


def measure_disk_quickly(machine: Machine, folder: Path, *, num_threads: int, on_step: OnStep) -> Machine:
    """Return a machine with the disk that a folder is on. Blocks: for a second. Raises: OSError."""
    on_step("disk")
    with disk_rates.disk_bench(folder, disk_rates.QUICK_FILE_BYTES, disk_rates.QUICK_CASES) as disk:
        disk.sample()
        calibrate.Rounds(num_threads, QUICK).beside(disk)
    return calibrate.with_disk(machine, folder, disk)


def assumed_machine(why: str, *, num_threads: int, ram_bytes: int) -> Machine:
    """Return the assumptions for a machine that cannot be measured."""
    processor = Processor(
        name="processor",
        peak_flops_per_s=(("float32", ASSUMED_FLOPS_PER_S * num_threads),),
        default_efficiency=ASSUMED_EFFICIENCY,
        pass_s=ASSUMED_PASS_S,
        token_s=ASSUMED_TOKEN_S,
        read_overlap=0.0,
    )
    ram = MemoryLevel(
        name=RAM, capacity_bytes=ram_bytes, read_bytes_per_s=ASSUMED_READ_BYTES_PER_S, processor=processor
    )
    return Machine(
        name="this machine",
        levels=(ram,),
        links=(),
        uncertainty=ASSUMED_UNCERTAINTY,
        sources=(("all", f"assumed: {why}"),),
        is_quick=True,
    )


def with_assumed_disk(machine: Machine, why: str) -> Machine:
    """Return a machine with the assumptions for its disk."""
    link = Link(source=DISK, target=RAM, rates=(LinkRate(transfer_bytes=MIB, bytes_per_s=ASSUMED_DISK_BYTES_PER_S),))
    disk = MemoryLevel(name=DISK, capacity_bytes=1, read_bytes_per_s=ASSUMED_DISK_BYTES_PER_S)
    sources = (*machine.sources, (DISK, f"assumed: {why}"))
    return replace(machine, levels=(disk, machine.level(RAM)), links=(*machine.links, link), sources=sources)
