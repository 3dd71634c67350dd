from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DTYPES, KernelEfficiency, Link, LinkRate, Machine, MemoryLevel, Processor
from moeflow.planner.hardware.hardware_json import machine_from_json, machine_to_json

CPU = Processor(
    name="cpu",
    peak_flops_per_s=(("float32", 1e12), ("int8", 4e12)),
    efficiencies=(
        KernelEfficiency(kernel="linear", dtype="int8", rows=1, share=0.5, values=1000),
        KernelEfficiency(kernel="linear", dtype="int8", rows=100, share=0.9, values=1000),
        KernelEfficiency(kernel="linear", dtype="int8", rows=1, share=0.8, values=10**6),
    ),
    default_efficiency=0.7,
)
MACHINE = Machine(
    name="small",
    levels=(
        MemoryLevel(name="disk", capacity_bytes=10**12, read_bytes_per_s=1e9),
        MemoryLevel(name="ram", capacity_bytes=10**10, read_bytes_per_s=4e10, processor=CPU),
    ),
    links=(Link(source="disk", target="ram", rates=(LinkRate(transfer_bytes=10**6, bytes_per_s=1e9, depth=4),)),),
    sources=(("ram", "a draft"),),
)


def test_a_machine_survives_json():
    assert machine_from_json(machine_to_json(MACHINE), "file") == MACHINE


def test_a_format_without_a_peak_of_its_own_is_widened():
    assert CPU.peak("int8") == CPU.peak("int4") == 4e12
    assert CPU.peak("float16") == CPU.peak("bfloat16") == 1e12
    assert Processor(name="x", peak_flops_per_s=(("int8", 5.0),)).peak("float32") == 5.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_falls_back_on_float32(dtype):
    measured = KernelEfficiency(kernel="linear", dtype="float32", rows=1, share=0.5)
    machine = Processor(name="x", peak_flops_per_s=(("float32", 5.0),), efficiencies=(measured,))
    assert machine.peak(dtype) == 5.0
    assert machine.measured("linear", dtype) == [(1, 0.5)]


@pytest.mark.parametrize(
    ("dtype", "nearest"),
    [
        ("int4-min", ("int4", "int8", "bfloat16", "float16")),
        ("bfloat16", ("float16",)),
        ("float16", ("bfloat16",)),
        ("float32", ()),
    ],
)
def test_what_stands_for_a_dtype_is_the_nearest_wider_one(dtype, nearest):
    for num_missing in range(len(nearest) + 1):
        known = (*nearest[num_missing:], "float32")
        machine = Processor(name="x", peak_flops_per_s=tuple((name, 1.0 + known.index(name)) for name in known[::-1]))
        assert machine.peak(dtype) == 1.0


def test_what_is_known_of_a_kernel_is_that_of_the_nearest_size_and_format():
    assert CPU.measured("linear", "int8", 2000) == [(1, 0.5), (100, 0.9)]
    assert CPU.measured("linear", "int8", 10**7) == [(1, 0.8)]
    assert CPU.measured("linear", "int4", 10) == [(1, 0.5), (100, 0.9)]  # widened
    assert CPU.measured("linear", "float32", 1000) == []
    assert CPU.measured("experts", "int8", 1000) == []


@given(st.floats(1, 1e12))
def test_a_links_rate_stays_between_its_points(num_bytes):
    rates = tuple(LinkRate(transfer_bytes=10**n, bytes_per_s=n * 1e9) for n in (3, 6, 9))
    link = Link(source="ram", target="device", rates=rates)
    assert 3e9 <= link.bytes_per_s(num_bytes) <= 9e9
    assert link.seconds(num_bytes) == num_bytes / link.bytes_per_s(num_bytes)


def test_the_best_depth_counts_unless_one_is_asked_for():
    rates = [
        LinkRate(transfer_bytes=100, bytes_per_s=rate, depth=depth) for depth, rate in ((1, 1.0), (8, 3.0), (32, 2.0))
    ]
    link = Link(source="disk", target="ram", rates=tuple(rates))
    assert link.bytes_per_s(100) == link.peak_bytes_per_s == 3.0
    assert link.bytes_per_s(100, depth=1) == 1.0
    assert link.bytes_per_s(100, depth=100) == 2.0
    assert link.seconds(0) == 0


def test_what_a_machine_lacks_is_named():
    assert MACHINE.compute_level.name == "ram"
    assert not MACHINE.has("device")
    with pytest.raises(ConfigError, match="no level 'device'"):
        MACHINE.level("device")
    with pytest.raises(ConfigError, match="no link from 'ram' to 'disk'"):
        MACHINE.link("ram", "disk")


def broken(change):
    raw = json.loads(machine_to_json(MACHINE))
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: raw.pop("name"), "file.json: Object missing required field `name`"),
        (lambda raw: raw.update(colour=1), r"Unknown field at `\$.colour` \(known are"),
        (lambda raw: raw.update(num_device=1), "did you mean 'num_devices'"),
        (lambda raw: raw.update(levels=[]), "no 'ram' with a processor"),
        (lambda raw: raw.update(levels=raw["levels"][:1]), "no 'ram' with a processor"),
        (lambda raw: raw["levels"].reverse(), "in the order disk, ram"),
        (
            lambda raw: raw["levels"][1].update(capacity_bytes="much"),
            r"write it like 4GiB.* at `\$.levels\[1\].capacity_bytes`",
        ),
        (
            lambda raw: raw["levels"][1].update(capacity_bytes=True),
            r"Expected `int`, got `bool` - at `\$.levels\[1\].capacity_bytes`",
        ),
        (
            lambda raw: raw["levels"][0].update(read_bytes_per_s=-1),
            r"Expected `float` > 0.0 - at `\$.levels\[0\].read_bytes_per_s`",
        ),
        (lambda raw: raw["levels"][1]["processor"].update(peak_flops_per_s={}), "length >= 1 - at .*peak_flops_per_s"),
        (
            lambda raw: raw["levels"][1]["processor"].update(peak_flops_per_s={"f7": 1}),
            "matching regex .*float32.* at .*peak_flops_per_s",
        ),
        (lambda raw: raw["levels"][1]["processor"]["efficiencies"][0].update(kernel="x"), r"efficiencies\[0\].kernel"),
        (
            lambda raw: raw["levels"][1]["processor"]["efficiencies"][0].update(dtype="int8\n"),
            r"efficiencies\[0\].dtype",
        ),
        (lambda raw: raw["links"][0].update(rates=[]), r"length >= 1 - at `\$.links\[0\].rates`"),
        (lambda raw: raw["levels"][1]["processor"].update(read_overlap=1.5), "Expected `float` <= 1.0"),
        (
            lambda raw: raw["links"][0]["rates"][0].update(depth=0),
            r"Expected `int` >= 1 - at `\$.links\[0\].rates\[0\].depth`",
        ),
        (lambda raw: raw["links"][0].update(target="device"), "leads from disk to device"),
        (lambda raw: raw["links"][0].update(is_shared="no"), "Expected `bool`, got `str`"),
        (lambda raw: raw.update(links=[]), "have none from disk to ram"),
        (lambda raw: raw.update(num_devices=1), "num_devices is 1"),
        (lambda raw: raw.update(sources=3), r"`\$.sources` is no object: write one such as {\"ram\": \"data sheet"),
        (lambda raw: raw.update(sources=["x"]), r"`\$.sources` is no object: write one"),
        (
            lambda raw: raw.update(sources={"disk": 2024}),
            r"`\$.sources.disk` has a value of the wrong type: write it as",
        ),
        (
            lambda raw: raw["levels"][1]["processor"].update(peak_flops_per_s=1e12),
            r"`\$.levels\[1\].processor.peak_flops_per_s` is no object: write one such as {\"float32\": 1e12}",
        ),
        *(
            (
                lambda raw, value=value: raw["levels"][1]["processor"].update(peak_flops_per_s={"int8": value}),
                r"`\$.levels\[1\].processor.peak_flops_per_s.int8` has a value of the wrong type: write it as",
            )
            for value in ("1e12", True, None, {})
        ),
        (lambda raw: raw.update(levels=[3]), r"Expected `object`, got `int` - at `\$.levels\[0\]`"),
        (lambda raw: raw.update(uncertainty=-1), r"Expected `float` >= 0.0 - at `\$.uncertainty`"),
        (lambda raw: raw.update(name=""), r"length >= 1 - at `\$.name`"),
    ],
)
def test_what_is_wrong_is_named_with_field_and_remedy(change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        machine_from_json(broken(change), "file.json")


def test_what_is_no_json_is_refused():
    for text in (b"\xff\xfe", b"{", b"[]"):
        with pytest.raises(ConfigError, match="machine file x"):
            machine_from_json(text, "x")


@pytest.mark.parametrize(("uncertainty", "words"), [(0.25, "good to 25%"), (1.3, "good to a factor of 2.3")])
def test_figures_that_lay_far_apart_are_a_factor_and_no_share(uncertainty, words):
    assert words in dataclasses.replace(MACHINE, uncertainty=uncertainty).caution
