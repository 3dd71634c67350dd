"""Machines as JSON, for people to write and for programs to keep: every error names field, cause and remedy.

Sizes may be numbers or texts like "16GiB". Unknown fields are errors that name the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import (
    DEVICE,
    DTYPES,
    KERNELS,
    LEVEL_NAMES,
    RAM,
    KernelEfficiency,
    Link,
    LinkRate,
    Machine,
    MemoryLevel,
    Processor,
)
from moeflow.core.units import parse_bytes

Item = TypeVar("Item")


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

    Raises: ConfigError if it is no JSON, a field is missing, unknown, of the wrong kind or out of range.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:  # also text that is not UTF-8
        raise ConfigError(
            f"machine file {name}: is no JSON ({error}). Compare it with one that moeflow ships"
        ) from None
    fields = _Fields(raw, name, "the machine")
    machine = Machine(
        name=fields.text("name"),
        levels=fields.items("levels", _level),
        links=fields.items("links", _link, least=0),
        num_devices=fields.count("num_devices", default=0, least=0),
        uncertainty=fields.number("uncertainty", default=0.25, least=0.0),
        identity=fields.text("identity", default=""),
        sources=tuple((key, str(value)) for key, value in fields.mapping("sources", default={}).items()),
    )
    fields.done()
    _check_whole(machine, fields)
    return machine


def _check_whole(machine: Machine, fields: _Fields) -> None:
    """Raises: ConfigError if parts do not fit together."""
    names = [level.name for level in machine.levels]
    if names != [name for name in LEVEL_NAMES if name in names]:
        raise fields.error(
            "levels", f"are {', '.join(names)}", f"give each once, in the order {', '.join(LEVEL_NAMES)}"
        )
    if RAM not in names or machine.level(RAM).processor is None:
        raise fields.error("levels", "have no 'ram' with a processor", "describe the host's memory and processor")
    if (DEVICE in names) != (machine.num_devices > 0):
        raise fields.error(
            "num_devices", f"is {machine.num_devices}", "at least 1 with a level 'device', 0 without one"
        )
    if DEVICE in names and machine.level(DEVICE).processor is None:
        raise fields.error("levels", "have a 'device' without a processor", "add one, or leave the device away")
    ways = {(link.source, link.target) for link in machine.links}
    for index, (source, target) in enumerate(ways):
        if source not in names or target not in names or source == target:
            raise fields.error(f"links[{index}]", f"leads from {source} to {target}", "join two levels of this machine")
    wanted = [("disk", "ram")] if "disk" in names else []
    wanted += [("ram", "device"), ("device", "ram")] if DEVICE in names else []
    wanted += [("ram", "pinned"), ("pinned", "device")] if "pinned" in names else []
    for source, target in wanted:
        if (source, target) not in ways:
            raise fields.error("links", f"have none from {source} to {target}", "add it")


def _level(fields: _Fields) -> MemoryLevel:
    has_processor = "processor" in fields.raw
    return MemoryLevel(
        name=fields.one_of("name", LEVEL_NAMES),
        capacity_bytes=fields.num_bytes("capacity_bytes"),
        read_bytes_per_s=fields.number("read_bytes_per_s"),
        processor=fields.item("processor", _processor) if has_processor else None,
    )


def _processor(fields: _Fields) -> Processor:
    peaks = fields.mapping("peak_flops_per_s")
    inner = _Fields(peaks, fields.file, f"{fields.place}.peak_flops_per_s")
    if not peaks or not set(peaks) <= set(DTYPES):
        raise fields.error("peak_flops_per_s", f"has {', '.join(peaks) or 'nothing'}", f"use {', '.join(DTYPES)}")
    return Processor(
        name=fields.text("name"),
        peak_flops_per_s=tuple((dtype, inner.number(dtype)) for dtype in peaks),
        efficiencies=fields.items("efficiencies", _efficiency, least=0),
        default_efficiency=fields.number("default_efficiency", default=1.0),
        launch_s=fields.number("launch_s", default=0.0, least=0.0),
        pass_s=fields.number("pass_s", default=0.0, least=0.0),
        token_s=fields.number("token_s", default=0.0, least=0.0),
    )


def _efficiency(fields: _Fields) -> KernelEfficiency:
    return KernelEfficiency(
        kernel=fields.one_of("kernel", KERNELS),
        dtype=fields.one_of("dtype", DTYPES),
        rows=fields.number("rows"),
        share=fields.number("share"),
        values=fields.count("values", default=0, least=0),
    )


def _link(fields: _Fields) -> Link:
    return Link(
        source=fields.one_of("source", LEVEL_NAMES),
        target=fields.one_of("target", LEVEL_NAMES),
        rates=fields.items("rates", _rate),
        is_shared=fields.flag("is_shared", default=True),
    )


def _rate(fields: _Fields) -> LinkRate:
    return LinkRate(
        transfer_bytes=fields.num_bytes("transfer_bytes"),
        bytes_per_s=fields.number("bytes_per_s"),
        depth=fields.count("depth", default=1),
    )


class _Fields:
    """One JSON object; remembers which of its fields were asked for."""

    def __init__(self, raw: Any, file: str, place: str) -> None:
        self.file = file
        self.place = place
        self._known: set[str] = set()
        if not isinstance(raw, Mapping):
            raise ConfigError(f"machine file {file}: {place} is {raw!r}. Write an object: {{...}}")
        self.raw = raw

    def error(self, key: str, cause: str, remedy: str) -> ConfigError:
        place = key if self.place == "the machine" else f"{self.place}.{key}"
        return ConfigError(f"machine file {self.file}: {place} {cause}: {remedy}")

    def done(self) -> None:
        """Raises: ConfigError if there is a field that nobody asked for."""
        for key in self.raw:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(self._known))}"
                raise self.error(key, "is unknown", hint)

    def _get(self, key: str, default: Any) -> Any:
        self._known.add(key)
        value = self.raw.get(key, default)
        if value is None:
            raise self.error(key, "is missing", "add it")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or (default is None and not value):
            raise self.error(key, f"is {value!r}", "write a text")
        return value

    def one_of(self, key: str, names: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in names:
            raise self.error(key, f"is {value!r}", f"use one of {', '.join(names)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}", "write true or false")
        return value

    def number(self, key: str, default: float | None = None, least: float | None = None) -> float:
        """Return a finite number, above 0 or at least `least`."""
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or (value <= 0 if least is None else value < least):
            bound = "above 0" if least is None else f"of at least {least:g}"
            raise self.error(key, f"is {value!r}", f"write a number {bound}")
        return float(value)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"is {value!r}", f"write a whole number of at least {least}")
        return value

    def num_bytes(self, key: str) -> int:
        value = self._get(key, None)
        if isinstance(value, str):
            try:
                return parse_bytes(value)
            except ConfigError as error:
                raise self.error(key, f"cannot be read ({error})", "write a number of bytes or a size") from None
        return int(self.number(key))

    def mapping(self, key: str, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        value = self._get(key, default)
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {value!r}", "write an object: {...}")
        return value

    def item(self, key: str, read: Callable[[_Fields], Item]) -> Item:
        return self._read_one(self._get(key, None), self._place(key), read)

    def items(self, key: str, read: Callable[[_Fields], Item], least: int = 1) -> tuple[Item, ...]:
        value = self._get(key, [] if least == 0 else None)
        if not isinstance(value, list) or len(value) < least:
            raise self.error(key, f"is {value!r}", "write a list: [...]" + (", with something in it" if least else ""))
        return tuple(self._read_one(one, f"{self._place(key)}[{index}]", read) for index, one in enumerate(value))

    def _place(self, key: str) -> str:
        return key if self.place == "the machine" else f"{self.place}.{key}"

    def _read_one(self, raw: Any, place: str, read: Callable[[_Fields], Item]) -> Item:
        fields = _Fields(raw, self.file, place)
        made = read(fields)
        fields.done()
        return made
