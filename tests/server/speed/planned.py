"""A tiny model and a machine of round figures that its plan was made for."""

from __future__ import annotations

from pathlib import Path

from moeflow.core.plan import Plan
from moeflow.planner.hardware.hardware_json import machine_to_json
from moeflow.planner.hardware.this_machine import machine_file
from moeflow.planner.planning import plan_for_start
from moeflow.planner.usage import SERVING
from moeflow.settings.settings import Settings
from tests.planner.examples import machine
from tests.tiny_mixtral import write_tiny_mixtral

READ_BYTES_PER_S, FLOPS_PER_S = 1e10, 1e11  # of the machine


def planned(folder: Path) -> Plan:
    """Write the model and the machine's description; return the plan that a server starts with."""
    write_tiny_mixtral(folder)
    file = machine_file(folder, 1)
    file.parent.mkdir()
    file.write_text(machine_to_json(machine(ram=2 * 10**9)))
    settings = Settings(model=str(folder), num_threads=1, cache_dir=folder, is_served=True, max_num_seqs=8)
    return plan_for_start(settings, SERVING)
