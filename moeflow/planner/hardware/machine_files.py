"""Machines by name or file: shipped with moeflow or other packages, or described by the user."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from moeflow.core.errors import ConfigError
from moeflow.core.extensions import ExtensibleTable
from moeflow.core.hardware import Machine
from moeflow.core.near_names import did_you_mean
from moeflow.core.untrusted import UnreadableError, read_bounded
from moeflow.planner.hardware.hardware_json import machine_from_json


def machine_names() -> list[str]:
    """Return the names of the machines that are shipped, moeflow's own first."""
    return list(_machines())


def load_machine(name_or_file: str) -> Machine:
    """Return a shipped machine by its name, or one from a JSON file.

    Raises: ConfigError if there is neither, or the description makes no sense.
    """
    machines = _machines()
    if name_or_file in machines:
        return machine_from_json(machines[name_or_file].read_bytes(), name_or_file)
    try:
        text = read_bounded(Path(name_or_file))
    except UnreadableError as error:
        hint = did_you_mean(name_or_file, machines, f"shipped machines are {', '.join(machines)}")
        raise ConfigError(
            f"machine {name_or_file!r} is no shipped machine and no file that can be read ({error}): {hint}"
        ) from None
    return machine_from_json(text, name_or_file)


def _machines() -> ExtensibleTable[Traversable]:
    shipped = (file for file in (files("moeflow.planner") / "machines").iterdir() if file.name.endswith(".json"))
    own = {file.name.removesuffix(".json"): file for file in shipped}
    return ExtensibleTable("moeflow.machines", {name: own[name] for name in sorted(own)}, Traversable)
