"""What a process that a test starts would else do first: import torch, and measure this machine, seconds each."""

from __future__ import annotations

import os
from pathlib import Path

from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.hardware.hardware_json import machine_to_json
from moeflow.planner.hardware.this_machine import machine_file
from tests.planner.examples import machine


def pack_beside(folder: Path, cache_dir: Path | None = None) -> None:
    """Pack a model where an engine finds it whose cache folder is `cache_dir`, or else the model's own folder; that
    knows the machine then, too.

    Without the extension nothing is packed, and engines start from the model itself.
    """
    know_this_machine(cache_dir or folder)
    if extension.is_available():
        pack(str(folder), None, cache_dir=cache_dir or folder)


def know_this_machine(cache_dir: Path) -> None:
    """Write round figures as the measured machine of that cache folder, for any number of threads."""
    for num_threads in range(1, (os.cpu_count() or 1) + 1):
        file = machine_file(cache_dir, num_threads)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(machine_to_json(machine(ram=2**34)))
