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
from moeflow.core.hardware_json import machine_from_json, machine_to_json
from moeflow.kernels import cpu
from moeflow.planner.calibrate import OnStep, is_as_measured, measure_kernels, measure_machine
from moeflow.planner.kernel_bench import KernelShape

VERSION: Final = 3  # to be raised when what is measured means something else


def machine_identity(num_threads: int) -> str:
    """Return what a description is valid for: processor, instruction set, threads, and how things are measured."""
    isa = cpu.isa_name() if cpu.is_available() else "torch"
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
    is_fresh: bool = False,
    on_step: OnStep = lambda _: None,
) -> Machine:
    """Return this machine with `ram_bytes` of memory to use; what is not known yet is measured.

    All of it if `is_fresh`, and if a glance shows that the machine is not as fast as it was, or is faster.
    Blocks: for some 15 seconds when all is measured, otherwise a second, and some more for each new model.
    Raises: OSError.
    """
    file = machine_file(cache_dir, num_threads)
    known = None if is_fresh else _load(file)
    if known is not None:
        on_step("whether it is as fast as it was")
        known = known if is_as_measured(known, num_threads) else None
    machine = known or measure_machine(
        "this machine", num_threads=num_threads, ram_bytes=ram_bytes, folder=cache_dir, shapes=shapes, on_step=on_step
    )
    machine = measure_kernels(machine, shapes, num_threads=num_threads, on_step=on_step)
    machine = replace(machine, identity=machine_identity(num_threads))
    if machine != known:
        _save(machine, file)
    levels = tuple(replace(it, capacity_bytes=ram_bytes) if it.name == RAM else it for it in machine.levels)
    return replace(machine, levels=levels)


def known_machine(cache_dir: Path, num_threads: int) -> Machine | None:
    """Return this machine as it was measured before, None if it never was."""
    return _load(machine_file(cache_dir, num_threads))


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
