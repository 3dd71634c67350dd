"""This machine's description: measured once, kept in the cache folder, and added to when a model has new shapes.

One that was measured quickly, for a start, stays until all is measured.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.hardware import DISK, RAM, Machine
from moeflow.core.sha256 import sha256
from moeflow.core.untrusted import UnreadableError, read_bounded
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.costs.roofline import processor_of
from moeflow.planner.hardware.hardware_json import machine_from_json, machine_to_json
from moeflow.planner.hardware.kernel_bench import KernelShape
from moeflow.planner.hardware.other_work import DISTURBING, OtherWork

if TYPE_CHECKING:
    from moeflow.planner.hardware.calibrate import OnStep

with on_demand(__name__):
    from moeflow.core import whole_file
    from moeflow.planner.hardware import calibrate, quick_calibration, rank_bench

TOO_UNCERTAIN: Final = 0.8  # rounds that differ by a factor of 1.8
CALM_S: Final = 0.2  # without other work, for which a provisional description is measured again
VERSION: Final = 6  # to be raised when measurements change their meaning


def machine_identity(num_threads: int) -> str:
    """Return what a description is valid for: processor, instruction set, threads, and how things are measured."""
    isa = extension.isa_name() if extension.is_available() else "torch"
    parts = (VERSION, platform.node(), platform.machine(), os.cpu_count(), num_threads, isa)
    return sha256(repr(parts).encode()).hexdigest()[:16]


def machine_file(cache_dir: Path, num_threads: int) -> Path:
    """Return where this machine's description is kept."""
    return cache_dir / "machines" / f"{machine_identity(num_threads)}.json"


def this_machine(
    cache_dir: Path,
    *,
    num_threads: int,
    ram_bytes: int,
    shapes: Sequence[KernelShape] = (),
    needs_ranks: bool = False,
    recalibrate: bool = False,
    on_step: OnStep = lambda _: None,
) -> Machine:
    """Return this machine with `ram_bytes` of memory to use; measures unknown figures.

    Measures all of it if `recalibrate`. Also if a quick check on an idle machine shows another speed, or a first
    measurement that other work disturbed. Calm measurements stay valid while others are at work.
    Blocks: for about 15 seconds when all is measured, otherwise a second, and a little more for each new model.
    Raises: OSError.
    """
    file = machine_file(cache_dir, num_threads)
    known = None if recalibrate else _load(file)
    if known is not None and known.is_quick:
        known = None
    machine = known if known is not None and _holds(known, num_threads, on_step) else None
    if machine is None:
        machine = calibrate.measure_machine(
            "this machine",
            num_threads=num_threads,
            ram_bytes=ram_bytes,
            folder=cache_dir,
            shapes=shapes,
            on_step=on_step,
        )
        if known is not None and was_disturbed(machine) and not was_disturbed(known):
            machine = known
    machine = calibrate.measure_kernels(machine, shapes, num_threads=num_threads, on_step=on_step)
    if needs_ranks:
        machine = rank_bench.with_ranks(machine, on_step)
    machine = replace(machine, identity=machine_identity(num_threads))
    if machine != known:
        _save(machine, file)
    return _with_ram(machine, ram_bytes)


class MachineNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a start needs of a machine."""

    num_threads: int
    ram_bytes: int  # to use
    shapes: tuple[KernelShape, ...] = ()  # of the model's kernels
    disk: bool = False
    ranks: bool = False

    def are_met(self, known: Machine) -> bool:
        """Return whether a machine that was measured before has them. A full description serves other shapes, too."""
        if self.ranks and not processor_of(known.level(RAM)).rank_layers:
            return False
        has_disk = known.has(DISK) or not self.disk
        return not known.is_quick or (has_disk and not quick_calibration.missing_parts(known, self.shapes))


def measured_for_start(cache_dir: Path, needs: MachineNeeds, on_step: OnStep) -> Machine:
    """Measure the missing facts of this machine in this process, keep and return them. See `machine_for_start`."""
    file = machine_file(cache_dir, needs.num_threads)
    kept = known = _load(file)
    if known is not None and _can_be_measured_better(known):
        known = None
    machine = known if known is not None and not known.is_quick else _quick(known, needs, on_step)
    if kept is not None and known is None and needs.are_met(kept) and machine.other_work > kept.other_work:
        known = machine = kept
    why_no_disk = "" if machine.measured_at else "it was not measured either"
    if needs.disk and machine.is_quick and not machine.has(DISK) and not why_no_disk:
        try:
            machine = quick_calibration.measure_disk_quickly(
                machine, cache_dir, num_threads=needs.num_threads, on_step=on_step
            )
        except OSError as error:
            why_no_disk = f"in {cache_dir} nothing could be measured ({error.strerror or error})"
    if needs.ranks and machine.measured_at:
        machine = rank_bench.with_ranks(machine, on_step)
    machine = replace(machine, identity=machine_identity(needs.num_threads))
    if machine.measured_at and machine != known:
        with contextlib.suppress(OSError):  # measured again at the next start
            _save(machine, file)
    return _with_disk(machine, why_no_disk, needs)


def assumed_for_start(cache_dir: Path, needs: MachineNeeds, why: str) -> Machine:
    """Return this machine as it was measured before, with assumptions for missing facts."""
    return _assumed(_load(machine_file(cache_dir, needs.num_threads)), why, needs)


def machine_for_start(
    cache_dir: Path,
    needs: MachineNeeds,
    *,
    measure: Callable[[Path, MachineNeeds, OnStep], Machine] = measured_for_start,
    on_step: OnStep = lambda _: None,
) -> Machine:
    """Return this machine as it was measured before; if it never was, as a second of measuring finds it.

    A full description is taken as it is kept. A quick one gets its missing facts. A provisional one of either kind
    is measured again while nothing else runs. `sources` name assumptions, which stand in where measuring fails.
    `measure`: here, or in a process of its own (`measuring_process.py`).
    Blocks: for a second if anything is missing, two with the disk, three more for ranks. A process of its own takes
    some seconds more. Raises nothing.
    """
    known = _load(machine_file(cache_dir, needs.num_threads))
    if known is None or not needs.are_met(known) or _can_be_measured_better(known):
        known = measure(cache_dir, needs, on_step)
    return _with_ram(known, needs.ram_bytes)


def known_machine(cache_dir: Path, num_threads: int) -> Machine | None:
    """Return this machine as it was measured before, None if it never was."""
    return _load(machine_file(cache_dir, num_threads))


def how_measured(machine: Machine) -> str:
    """Return when a machine was measured, and under which load: "measured 2026-01-31 ..."; empty for data sheets."""
    if not machine.measured_at:
        return ""
    day = f"measured {'quickly ' if machine.is_quick else ''}{machine.measured_at[:10]}"
    return f"{day} while other work had {machine.other_work:.0%} of the processor" if was_disturbed(machine) else day


def was_disturbed(machine: Machine) -> bool:
    """Return whether a machine was measured beside other work, so that its figures may be too low."""
    return machine.other_work >= DISTURBING


def is_provisional(machine: Machine) -> bool:
    """Return whether a machine should be measured again: it was disturbed, or its rounds differ too much."""
    return was_disturbed(machine) or machine.uncertainty >= TOO_UNCERTAIN


def _can_be_measured_better(known: Machine) -> bool:
    """Return whether a machine is provisional and nothing else is at work now. Blocks: for a moment if it is."""
    if not is_provisional(known):
        return False
    others = OtherWork()
    time.sleep(CALM_S)
    return others.share < DISTURBING


def _holds(known: Machine, num_threads: int, on_step: OnStep) -> bool:
    """Say, by a glance, whether a description is to be kept: beside other work nothing better is to be had."""
    on_step("whether it is as fast as it was")
    others = OtherWork()
    is_as_fast = calibrate.is_as_measured(known, num_threads)
    return others.share >= DISTURBING or (is_as_fast and not was_disturbed(known))


def _quick(known: Machine | None, needs: MachineNeeds, on_step: OnStep) -> Machine:
    """Return the known figures plus those of missing shapes, or assumptions if nothing can be measured."""
    why = extension.why_not()
    if extension.is_available():
        try:
            return quick_calibration.measure_quickly(
                known, needs.shapes, num_threads=needs.num_threads, ram_bytes=needs.ram_bytes, on_step=on_step
            )
        except (OSError, MemoryError, RuntimeError, CapacityError) as error:
            why = f"measuring failed ({error})"
    return known or _assumed(None, why, needs)


def _assumed(known: Machine | None, why: str, needs: MachineNeeds) -> Machine:
    """Return the known facts of a machine, and assumptions in place of the others."""
    machine = known or quick_calibration.assumed_machine(why, num_threads=needs.num_threads, ram_bytes=needs.ram_bytes)
    return _with_disk(replace(machine, identity=machine_identity(needs.num_threads)), why, needs)


def _with_disk(machine: Machine, why: str, needs: MachineNeeds) -> Machine:
    """Return a machine with an assumed disk where one is needed and not known."""
    lacks_disk = needs.disk and machine.is_quick and not machine.has(DISK)
    return quick_calibration.with_assumed_disk(machine, why) if lacks_disk else machine


def _with_ram(machine: Machine, ram_bytes: int) -> Machine:
    levels = tuple(replace(it, capacity_bytes=ram_bytes) if it.name == RAM else it for it in machine.levels)
    return replace(machine, levels=levels)


def _load(file: Path) -> Machine | None:
    """Return the stored machine; None if there is nothing, or nothing that can be read."""
    try:
        return machine_from_json(read_bounded(file), str(file))
    except (UnreadableError, ConfigError):
        return None


def _save(machine: Machine, file: Path) -> None:
    with whole_file.whole_file(file) as new:
        new.write_text(machine_to_json(machine))
