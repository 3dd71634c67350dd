"""Machines as JSON, written by people or programs. Sizes may be numbers or texts like "16GiB"."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, DISK, LEVEL_NAMES, PINNED, RAM, RANK, REMOTE_RANK, Machine
from moeflow.core.typed_json import convert
from moeflow.core.units import parse_bytes
from moeflow.core.untrusted import UnreadableError, parse_json

_RANKS: Final = (RANK, REMOTE_RANK)  # targets of a link from a rank
# Objects in JSON, pairs in a machine: the types of their values, and an example.
_TABLES: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "peak_flops_per_s": ((int, float), '{"float32": 1e12}'),
    "sources": ((str,), '{"ram": "data sheet of 2024"}'),
}
_SIZES: Final = ("capacity_bytes", "transfer_bytes")


def machine_to_json(machine: Machine) -> str:
    """Return a machine as indented JSON, which `machine_from_json` reads back as an equal one."""
    raw = asdict(machine)
    raw["sources"] = dict(machine.sources)
    for level, made in zip(raw["levels"], machine.levels, strict=True):
        if made.processor is None:
            del level["processor"]
        else:
            level["processor"]["peak_flops_per_s"] = dict(made.processor.peak_flops_per_s)
    return json.dumps(raw, indent=1, allow_nan=False) + "\n"


def machine_from_json(text: str | bytes, name: str) -> Machine:
    """Read a machine; `name` is the file's, for messages.

    Raises: ConfigError if it is no JSON, a field is missing, unknown, of the wrong type or out of range.
    """
    try:
        machine = convert(_plain(parse_json(text), "$"), Machine)
        _check_levels(machine)
        _check_links(machine)
    except UnreadableError as error:
        raise ConfigError(f"machine file {name}: {error}. Compare it with one that moeflow made") from None
    return machine


def _plain(raw: Any, place: str) -> Any:
    """Return JSON with tables as pairs and sizes as numbers. Raises: UnreadableError if one is of the wrong type."""
    key = place.rpartition(".")[2]
    if key in _TABLES:
        return _pairs(raw, key, place)
    if isinstance(raw, dict):
        return {each: _plain(value, f"{place}.{each}") for each, value in raw.items()}
    if isinstance(raw, list):
        return [_plain(value, f"{place}[{index}]") for index, value in enumerate(raw)]
    if key in _SIZES and isinstance(raw, str):
        try:
            return parse_bytes(raw)
        except ConfigError as error:
            raise UnreadableError(f"{error} - at `{place}`") from None
    return int(raw) if key in _SIZES and isinstance(raw, float) and raw.is_integer() else raw


def _pairs(raw: Any, key: str, place: str) -> list[tuple[str, Any]]:
    """Return a table as pairs. Raises: UnreadableError, which names the place and an example."""
    types, example = _TABLES[key]
    if not isinstance(raw, dict):
        raise UnreadableError(f"`{place}` is no object: write one such as {example}")
    for name, value in raw.items():
        if type(value) not in types:
            raise UnreadableError(f"`{place}.{name}` has a value of the wrong type: write it as in {example}")
    return list(raw.items())


def _check_levels(machine: Machine) -> None:
    """Raise UnreadableError if levels do not match."""
    names = [level.name for level in machine.levels]
    if names != [name for name in LEVEL_NAMES if name in names]:
        raise UnreadableError(f"levels are {', '.join(names)}: give each once, in the order {', '.join(LEVEL_NAMES)}")
    if RAM not in names or machine.level(RAM).processor is None:
        raise UnreadableError("levels have no 'ram' with a processor: describe the host's memory and processor")
    if machine.has(DEVICE) != (machine.num_devices > 0):
        raise UnreadableError(
            f"num_devices is {machine.num_devices}: write at least 1 with a level 'device', 0 without one"
        )
    if machine.has(DEVICE) and machine.level(DEVICE).processor is None:
        raise UnreadableError("levels have a 'device' without a processor: add one, or remove the device")


def _check_links(machine: Machine) -> None:
    """Raise UnreadableError if links do not match the levels."""
    ways = [(link.source, link.target) for link in machine.links]
    for index, (source, target) in enumerate(ways):
        joins_ranks = source == RANK and target in _RANKS
        if not joins_ranks and not (machine.has(source) and machine.has(target) and source != target):
            remedy = f"join two levels of this machine, or {RANK!r} with {RANK!r} or {REMOTE_RANK!r}"
            raise UnreadableError(f"links[{index}] leads from {source} to {target}: {remedy}")
    wanted = [(DISK, RAM)] if machine.has(DISK) else []
    wanted += [(RAM, DEVICE), (DEVICE, RAM)] if machine.has(DEVICE) else []
    wanted += [(RAM, PINNED), (PINNED, DEVICE)] if machine.has(PINNED) else []
    for source, target in wanted:
        if (source, target) not in ways:
            raise UnreadableError(f"links have none from {source} to {target}: add it")
