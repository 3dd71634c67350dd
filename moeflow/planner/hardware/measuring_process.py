"""Measures a machine in a process of its own, so that torch and buffers of measurements take no memory afterwards.

The order goes to its stdin; lines of JSON with steps come back, the last with the machine. A process that the kernel
kills for lack of memory costs the measurement alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moeflow.core.apart import run_apart
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import Machine
from moeflow.planner.hardware.hardware_json import machine_from_json, machine_to_json
from moeflow.planner.hardware.this_machine import MachineNeeds, assumed_for_start, measured_for_start

if TYPE_CHECKING:
    from moeflow.planner.hardware.calibrate import OnStep


class _Order(msgspec.Struct, frozen=True):
    cache_dir: str
    needs: MachineNeeds


class _MeasuringReport(msgspec.Struct, frozen=True):
    step: str = ""
    machine: str = ""  # JSON, once it is measured


def measure_apart(cache_dir: Path, needs: MachineNeeds, on_step: OnStep) -> Machine:
    """Return the machine that `measured_for_start` finds in another process; if that ends early, assumptions.

    Blocks: for some seconds.
    """
    machine: Machine | None = None
    order = msgspec.json.encode(_Order(str(cache_dir.absolute()), needs))
    try:
        for line in run_apart(__name__, order):
            report = msgspec.json.decode(line, type=_MeasuringReport)
            on_step(report.step)
            machine = machine_from_json(report.machine, "a measurement") if report.machine else machine
    except (OSError, msgspec.DecodeError, ConfigError):
        machine = None
    return machine or assumed_for_start(cache_dir, needs, "the process that measures ended early")


def main() -> None:
    """Carry out the order on stdin."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=_Order)
    machine = measured_for_start(Path(order.cache_dir), order.needs, lambda step: _say(_MeasuringReport(step=step)))
    _say(_MeasuringReport(machine=machine_to_json(machine)))


def _say(report: _MeasuringReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
