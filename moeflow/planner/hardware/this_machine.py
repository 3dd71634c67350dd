"""This machine's description: measured once, kept in the cache folder, and added to when a model has new shapes."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import RAM, Machine
from moeflow.kernels.cpu import extension
from moeflow.planner.hardware.calibrate import OnStep, is_as_measured, measure_kernels, measure_machine
from moeflow.planner.hardware.hardware_json import machine_from_json, machine_to_json
from moeflow.planner.hardware.kernel_bench import KernelShape
from moeflow.planner.hardware.other_work import DISTURBING, OtherWork

VERSION: Final = 4  # to be raised when what is measured means something else


def machine_identity(num_threads: int) -> str:
    """Return what a description is valid for: processor, instruction set, threads, and how things are measured."""
    isa = extension.isa_name() if extension.is_available() else "torch"
    parts = (VERSION, platform.node(), platform.machine(), os.cpu_count(), num_threads, isa)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def machine_file(cache_dir: Path, num_threads: int) -> Path:
    """Return where this machine's description is kept."""
    return cache_dir / "machines" / f"{machine_identity(num_threads)}.json"


def this_machine(
    cache_dir: Path,
    *,
    num_threads: int,
    ram_bytes: int,
    shapes: Sequence[KernelShape] = (),
    recalibrate: bool = False,
    on_step: OnStep = lambda _: None,
) -> Machine:
    """Return this machine with `ram_bytes` of memory to use; what is not known yet is measured.

    All of it if `recalibrate`, and if a glance, while nobody else is at work, shows that the machine is not as fast as
    it was, or is faster, or it was measured beside other work. What was measured calmly stays while others are at work.
    Blocks: for some 15 seconds when all is measured, otherwise a second, and some more for each new model.
    Raises: OSError.
    """
    file = machine_file(cache_dir, num_threads)
    known = None if recalibrate else _load(file)
    machine = known if known is not None and _holds(known, num_threads, on_step) else None
    if machine is None:
        machine = measure_machine(
            "this machine",
            num_threads=num_threads,
            ram_bytes=ram_bytes,
            folder=cache_dir,
            shapes=shapes,
            on_step=on_step,
        )
        if known is not None and was_disturbed(machine) and not was_disturbed(known):
            machine = known
    machine = measure_kernels(machine, shapes, num_threads=num_threads, on_step=on_step)
    machine = replace(machine, identity=machine_identity(num_threads))
    if machine != known:
        _save(machine, file)
    levels = tuple(replace(it, capacity_bytes=ram_bytes) if it.name == RAM else it for it in machine.levels)
    return replace(machine, levels=levels)


def known_machine(cache_dir: Path, num_threads: int) -> Machine | None:
    """Return this machine as it was measured before, None if it never was."""
    return _load(machine_file(cache_dir, num_threads))


def machine_for_start(
    cache_dir: Path,
    *,
    num_threads: int,
    ram_bytes: int,
    shapes: Sequence[KernelShape] = (),
    needs_disk: bool = False,
    on_step: OnStep = lambda _: None,
) -> Machine | None:
    """Return this machine as it was measured before, with `ram_bytes` of memory to use; None if it never was."""
    machine = known_machine(cache_dir, num_threads)
    if machine is None:
        return None
    levels = tuple(replace(it, capacity_bytes=ram_bytes) if it.name == RAM else it for it in machine.levels)
    return replace(machine, levels=levels)


def how_measured(machine: Machine) -> str:
    """Return when a machine was measured, and beside what: "measured 2026-01-31 ..."; empty for data sheets."""
    if not machine.measured_at:
        return ""
    day = f"measured {machine.measured_at[:10]}"
    return f"{day} while other work had {machine.other_work:.0%} of the processor" if was_disturbed(machine) else day


def was_disturbed(machine: Machine) -> bool:
    """Say whether a machine was measured beside other work, so that its figures may be too low."""
    return machine.other_work >= DISTURBING


def _holds(known: Machine, num_threads: int, on_step: OnStep) -> bool:
    """Say, by a glance, whether a description is to be kept: beside other work nothing better is to be had."""
    on_step("whether it is as fast as it was")
    others = OtherWork()
    is_as_fast = is_as_measured(known, num_threads)
    return others.share >= DISTURBING or (is_as_fast and not was_disturbed(known))


def _load(file: Path) -> Machine | None:
    """Return what is kept; None if there is nothing, or nothing that can be read."""
    try:
        return machine_from_json(file.read_bytes(), str(file))
    except (OSError, ConfigError):
        return None


def _save(machine: Machine, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        new.write_text(machine_to_json(machine))
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
