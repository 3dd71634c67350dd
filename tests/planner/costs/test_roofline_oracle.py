"""Equations 7 to 14 of MoE-Lightning with numbers worked by hand."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import KernelEfficiency, Link, LinkRate, Machine, MemoryLevel, Processor
from moeflow.planner.costs.model_costs import KernelWork
from moeflow.planner.costs.roofline import Roofs, processor_of, roofs, work_seconds

# A device of 100 GFLOP/s and 20 GB/s, a host of 12 GFLOP/s and 8 GB/s, and 2 GB/s between them.
ROOFS = Roofs(peak=100e9, bandwidth=20e9, far_peak=12e9, far_bandwidth=8e9, link=2e9)
HOST = Processor(name="cpu", peak_flops_per_s=(("float32", 12e9), ("int8", 24e9)))
GPU = Processor(
    name="gpu", peak_flops_per_s=(("float32", 100e9), ("int8", 400e9)), default_efficiency=0.5, launch_s=0.25
)
RAM = MemoryLevel(name="ram", capacity_bytes=10**9, read_bytes_per_s=8e9, processor=HOST)
DEVICE = MemoryLevel(name="device", capacity_bytes=10**9, read_bytes_per_s=20e9, processor=GPU)
DISK = MemoryLevel(name="disk", capacity_bytes=10**9, read_bytes_per_s=3e9)
RATES = (LinkRate(transfer_bytes=1, bytes_per_s=1e9), LinkRate(transfer_bytes=100, bytes_per_s=2e9))
MACHINE = Machine(
    name="by hand",
    levels=(DISK, RAM, DEVICE),
    links=(
        Link(source="ram", target="device", rates=RATES),
        Link(source="device", target="ram", rates=RATES[:1]),
        Link(source="disk", target="ram", rates=(LinkRate(transfer_bytes=1, bytes_per_s=5e8),)),
    ),
    num_devices=1,
)


@pytest.mark.parametrize(("intensity", "reached"), [(1, 20e9), (4, 80e9), (5, 100e9), (6, 100e9)])
def test_a_level_is_bound_by_its_memory_then_by_its_processor(intensity, reached):
    assert ROOFS.local(intensity) == reached  # equation 8


@pytest.mark.parametrize(("intensity", "reached"), [(0.5, 4e9), (1.5, 12e9), (3, 12e9)])
def test_the_far_level_likewise(intensity, reached):
    assert ROOFS.far(intensity) == reached


def test_turning_and_balance_points():
    assert ROOFS.turning_point_2(3.0) == 30.0  # the device's memory gives 60 GFLOP/s
    assert ROOFS.turning_point_2(8.0) == 50.0  # its processor's 100 GFLOP/s
    assert ROOFS.balance(3.0) == 30.0  # equation 11, without the processor
    assert ROOFS.balance(8.0) == 80.0
    assert ROOFS.turning_point_1 == 6.0
    assert dataclasses.replace(ROOFS, far_bandwidth=2e9).turning_point_1 == 0.0  # then the host is never ahead


def test_the_roofs_of_a_machine():
    assert roofs(MACHINE, "device", "ram", "float32") == ROOFS
    assert roofs(MACHINE, "device", "ram", "int8") == dataclasses.replace(ROOFS, peak=400e9, far_peak=24e9)
    assert roofs(MACHINE, "ram", "disk", "float32") == Roofs(12e9, 8e9, 0.0, 3e9, 5e8)
    assert roofs(MACHINE, "ram", "device", "float32") == Roofs(12e9, 8e9, 100e9, 20e9, 1e9)
    with pytest.raises(ConfigError, match="no link from 'disk' to 'device'"):
        roofs(MACHINE, "device", "disk", "float32")
    assert processor_of(RAM) is HOST


@pytest.mark.parametrize(
    ("num_bytes", "num_flops", "devices", "seconds"),
    [
        (40e9, 100e9, 1, 2 / 0.5 + 0.25),  # two seconds to read, one to compute
        (20e9, 300e9, 1, 3 / 0.5 + 0.25),
        (20e9, 300e9, 2, 1.5 / 0.5 + 0.25),
        (40e9, 0.0, 4, 0.5 / 0.5 + 0.25),
        (0.0, 100e9, 1, 1 / 0.5 + 0.25),
        (0.0, 0.0, 1, 0.0),
    ],
)
def test_work_takes_the_slower_of_its_roofs(num_bytes, num_flops, devices, seconds):
    work = KernelWork("linear", "float32", num_bytes, num_flops, 1.0, 10)
    assert work_seconds(DEVICE, work, devices) == pytest.approx(seconds)


def test_the_efficiency_is_that_of_the_kernel_the_format_and_the_shape():
    def entry(rows, share, values=100, kernel="experts", dtype="int8"):
        return KernelEfficiency(kernel=kernel, dtype=dtype, rows=rows, share=share, values=values)

    known = (entry(1, 0.1), entry(16, 0.5), entry(1, 0.9, values=10**6), entry(1, 0.7, kernel="linear"))
    level = dataclasses.replace(DEVICE, processor=dataclasses.replace(GPU, efficiencies=known, launch_s=0.0))

    def seconds(kernel, dtype, rows, values):
        return work_seconds(level, KernelWork(kernel, dtype, 20e9, 1.0, rows, values))

    assert seconds("experts", "int8", 1, 100) == pytest.approx(1 / 0.1)
    assert seconds("experts", "int8", 4, 100) == pytest.approx(10 + (2 - 10) * 3 / 15)
    assert seconds("experts", "int8", 64, 100) == pytest.approx(1 / 0.5)
    assert seconds("experts", "int8", 64, 10**5) == pytest.approx(1 / 0.9)
    assert seconds("linear", "int8", 1, 100) == pytest.approx(1 / 0.7)
    assert seconds("experts", "float32", 1, 100) == pytest.approx(1 / 0.5)


def test_time_between_two_measurements_lies_on_the_line_between_them():
    """20 GB/s and 400 GFLOP/s: a matrix of 20 GB in int8 meets the bend of its roof at ten rows.

    At 8 rows it takes 1 s, at 24 rows 2.4 s. Between them, neither memory nor arithmetic is used fully. Interpolating
    the share of the roof between 1 and 1 would give 1 s at the bend.
    """
    known = tuple(KernelEfficiency(kernel="linear", dtype="int8", rows=rows, share=1.0) for rows in (8, 24))
    level = dataclasses.replace(DEVICE, processor=dataclasses.replace(GPU, efficiencies=known, launch_s=0.0))

    def seconds(rows):
        return work_seconds(level, KernelWork("linear", "int8", 20e9, 40e9 * rows, rows, 1))

    assert [seconds(rows) for rows in (1, 8, 24, 48)] == pytest.approx([1.0, 1.0, 2.4, 4.8])
    assert seconds(10) == pytest.approx(1.0 + 1.4 / 8)
    assert seconds(16) == pytest.approx(1.7)
    times = [seconds(rows / 4) for rows in range(4, 200)]
    assert times == sorted(times)
