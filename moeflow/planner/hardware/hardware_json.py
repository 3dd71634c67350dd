"""Machines as JSON, for people to write and for programs to keep: every error names field, cause and remedy.

Sizes may be numbers or texts like "16GiB". Unknown fields are errors that name the nearest known one.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from moeflow.core.hardware import (
    DEFAULT_LOAD_S,
    DEFAULT_OVERLAP,
    DEFAULT_STOP_S,
    DEVICE,
    DTYPES,
    KERNELS,
    LEVEL_NAMES,
    RAM,
    RANK,
    REMOTE_RANK,
    KernelEfficiency,
    Link,
    LinkRate,
    Machine,
    MemoryLevel,
    Processor,
    RankLayer,
)
from moeflow.core.parallel_config import ATTENTION_LAYOUTS, EXPERT_LAYOUTS
from moeflow.planner.hardware.json_fields import Fields, read_json

RANKS = (RANK, REMOTE_RANK)  # whom a link may lead to from a rank


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
    return read_json(text, f"machine file {name}", _machine)


def _machine(fields: Fields) -> Machine:
    machine = Machine(
        name=fields.text("name"),
        levels=fields.items("levels", _level),
        links=fields.items("links", _link, least=0),
        num_devices=fields.count("num_devices", default=0, least=0),
        uncertainty=fields.number("uncertainty", default=0.25, least=0.0),
        identity=fields.text("identity", default=""),
        sources=tuple((key, str(value)) for key, value in fields.mapping("sources", default={}).items()),
        measured_at=fields.text("measured_at", default=""),
        other_work=fields.number("other_work", default=0.0, least=0.0),
        is_quick=fields.flag("is_quick", default=False),
    )
    _check_whole(machine, fields)
    return machine


def _check_whole(machine: Machine, fields: Fields) -> None:
    """Raises: ConfigError if parts do not match."""
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
        if source == RANK and target in RANKS:
            continue
        if source not in names or target not in names or source == target:
            remedy = f"join two levels of this machine, or {RANK!r} with {RANK!r} or {REMOTE_RANK!r}"
            raise fields.error(f"links[{index}]", f"leads from {source} to {target}", remedy)
    wanted = [("disk", "ram")] if "disk" in names else []
    wanted += [("ram", "device"), ("device", "ram")] if DEVICE in names else []
    wanted += [("ram", "pinned"), ("pinned", "device")] if "pinned" in names else []
    for source, target in wanted:
        if (source, target) not in ways:
            raise fields.error("links", f"have none from {source} to {target}", "add it")


def _level(fields: Fields) -> MemoryLevel:
    has_processor = "processor" in fields.raw
    return MemoryLevel(
        name=fields.one_of("name", LEVEL_NAMES),
        capacity_bytes=fields.num_bytes("capacity_bytes"),
        read_bytes_per_s=fields.number("read_bytes_per_s"),
        processor=fields.item("processor", _processor) if has_processor else None,
    )


def _processor(fields: Fields) -> Processor:
    peaks = fields.mapping("peak_flops_per_s")
    inner = Fields(peaks, fields.file, f"{fields.place}.peak_flops_per_s")
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
        stop_s=fields.number("stop_s", default=DEFAULT_STOP_S, least=0.0),
        load_s=fields.number("load_s", default=DEFAULT_LOAD_S, least=0.0),
        read_overlap=_overlap(fields),
        rank_layers=fields.items("rank_layers", _rank_layer, least=0),
    )


def _overlap(fields: Fields) -> float:
    overlap = fields.number("read_overlap", default=DEFAULT_OVERLAP, least=0.0)
    if overlap > 1.0:
        raise fields.error("read_overlap", f"is {overlap:g}", "write a number from 0 to 1")
    return overlap


def _rank_layer(fields: Fields) -> RankLayer:
    return RankLayer(
        expert_layout=fields.one_of("expert_layout", EXPERT_LAYOUTS),
        attention_layout=fields.one_of("attention_layout", ATTENTION_LAYOUTS),
        seconds=fields.number("seconds", least=0.0),
    )


def _efficiency(fields: Fields) -> KernelEfficiency:
    return KernelEfficiency(
        kernel=fields.one_of("kernel", KERNELS),
        dtype=fields.one_of("dtype", DTYPES),
        rows=fields.number("rows"),
        share=fields.number("share"),
        values=fields.count("values", default=0, least=0),
    )


def _link(fields: Fields) -> Link:
    return Link(
        source=fields.one_of("source", (*LEVEL_NAMES, *RANKS)),
        target=fields.one_of("target", (*LEVEL_NAMES, *RANKS)),
        rates=fields.items("rates", _rate),
        is_shared=fields.flag("is_shared", default=True),
    )


def _rate(fields: Fields) -> LinkRate:
    return LinkRate(
        transfer_bytes=fields.num_bytes("transfer_bytes"),
        bytes_per_s=fields.number("bytes_per_s"),
        depth=fields.count("depth", default=1),
    )
