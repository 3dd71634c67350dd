"""Machines by name or file: those that moeflow ships, and a user's own descriptions."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import Machine
from moeflow.planner.hardware.hardware_json import machine_from_json

_SHIPPED = files("moeflow.planner") / "machines"


def machine_names() -> list[str]:
    """Return the names of the machines that are shipped."""
    return sorted(file.name.removesuffix(".json") for file in _SHIPPED.iterdir() if file.name.endswith(".json"))


def load_machine(name_or_file: str) -> Machine:
    """Return a shipped machine by its name, or one from a JSON file.

    Raises: ConfigError if there is neither, or the description makes no sense.
    """
    names = machine_names()
    if name_or_file in names:
        return machine_from_json((_SHIPPED / f"{name_or_file}.json").read_bytes(), name_or_file)
    try:
        return machine_from_json(Path(name_or_file).read_bytes(), name_or_file)
    except OSError as error:
        near = difflib.get_close_matches(name_or_file, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"shipped machines are {', '.join(names)}"
        raise ConfigError(
            f"machine {name_or_file!r} is no shipped machine and no file that can be read "
            f"({error.strerror or error}): {hint}"
        ) from None
