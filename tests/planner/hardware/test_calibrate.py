"""That measuring measures, on little; what the figures are is the machine's business."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import cycle

import pytest

from moeflow.core.hardware import DISK, RAM, Machine
from moeflow.kernels.cpu import extension
from moeflow.planner.costs.model_costs import Formats, KernelWork, ModelCosts
from moeflow.planner.hardware import calibrate, disk_rates, kernel_bench, this_machine
from moeflow.planner.hardware.calibrate import is_as_measured, measure_kernels, measure_machine
from moeflow.planner.hardware.disk_rates import disk_bench
from moeflow.planner.hardware.hardware_json import machine_from_json, machine_to_json
from moeflow.planner.hardware.kernel_bench import BestRates, KernelShape, shapes_of
from moeflow.planner.hardware.pass_bench import EngineTimes
from tests.planner.examples import SMALL
from tests.planner.hardware.other_processes import others_take

needs_kernels = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
SHAPES = (
    KernelShape("linear", "int8", (32, 64)),
    KernelShape("experts", "bfloat16", (4, 2, 64, 32)),
    KernelShape("attention", "float32", (4, 2, 16)),
    KernelShape("attention", "int8", (4, 1, 24, 16)),  # latent
)


ENGINE = cycle([EngineTimes(1.0, 2.0, 6.0, 7.0), EngineTimes(3.0, 1.0, 4.0, 9.0), EngineTimes(2.0, 3.0, 5.0, 8.0)])


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(kernel_bench, "BUFFER_BYTES", 2**20)
    little = dataclasses.replace(kernel_bench.THOROUGH, tokens=(1, 4), min_s=0.0, num_passes=2)
    monkeypatch.setattr(calibrate, "THOROUGH", little)
    monkeypatch.setattr(calibrate, "measure_engine", lambda *_: next(ENGINE))
    monkeypatch.setattr(calibrate, "GENERAL", SHAPES[:1])
    monkeypatch.setattr(calibrate, "GLANCE_S", 0.0)
    monkeypatch.setattr(disk_rates, "MIN_S", 0.001)
    monkeypatch.setattr(calibrate, "disk_bench", partial(disk_bench, file_bytes=2**22))
    monkeypatch.setattr(calibrate, "is_as_measured", lambda *_: True)  # so little is measured badly
    others_take(monkeypatch, 0.0)


def test_disk_is_measured_by_size_and_depth_and_nothing_is_left(little, tmp_path):
    with disk_bench(tmp_path, 2**22) as disk:
        disk.sample()
        disk.sample()
    link = disk.link()
    assert {(rate.transfer_bytes, rate.depth) for rate in link.rates} == {
        (size, depth) for size in disk_rates.SIZES for depth in disk_rates.DEPTHS
    }
    assert all(rate.bytes_per_s > 0 for rate in link.rates)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_kernels
def test_a_machine_is_measured_and_kernels_of_a_model_are_added_once(little, tmp_path, monkeypatch):
    steps: list[str] = []
    arguments = {"num_threads": 2, "ram_bytes": 10**9}
    machine = this_machine.this_machine(tmp_path, **arguments, on_step=steps.append)
    assert machine.level(RAM).capacity_bytes == 10**9
    assert machine.has(DISK)
    assert {"disk, 1 of 3", "linear in int8, 3 of 3", "passes, 2 of 3"} <= set(steps)
    host = machine.level(RAM).processor
    assert (host.pass_s, host.token_s, host.stop_s, host.load_s) == (2.0, 2.0, 5.0, 8.0)  # the medians of three rounds
    assert 0.0 <= host.read_overlap <= 1.0
    known = machine.level(RAM).processor.efficiencies
    assert {(entry.kernel, entry.dtype, entry.rows, entry.values) for entry in known} == {
        ("linear", "int8", rows, 32 * 64) for rows in (1, 4)
    }
    assert all(0 < entry.share < 100 for entry in known)
    more = this_machine.this_machine(tmp_path, **arguments, shapes=SHAPES)
    entries = more.level(RAM).processor.efficiencies
    assert set(entries) > set(known)
    assert {entry.kernel for entry in entries} == {"linear", "experts", "attention"}
    monkeypatch.setattr(calibrate, "measure_machine", None)
    again = this_machine.this_machine(tmp_path, num_threads=2, ram_bytes=5, shapes=SHAPES)
    assert again.level(RAM).processor == more.level(RAM).processor
    assert again.level(RAM).capacity_bytes == 5


@pytest.mark.slow
@needs_kernels
def test_what_is_kept_is_measured_anew_if_damaged_or_asked_for(little, tmp_path, monkeypatch):
    arguments = {"num_threads": 1, "ram_bytes": 10**9}
    this_machine.this_machine(tmp_path, **arguments)
    count = []
    original = measure_machine
    monkeypatch.setattr(
        calibrate, "measure_machine", lambda *args, **others: count.append(1) or original(*args, **others)
    )
    this_machine.this_machine(tmp_path, **arguments)
    assert not count
    this_machine.this_machine(tmp_path, **arguments, recalibrate=True)
    this_machine.machine_file(tmp_path, 1).write_text("{")
    this_machine.this_machine(tmp_path, **arguments)
    assert len(count) == 2


@pytest.mark.slow
@needs_kernels
def test_a_layer_larger_than_the_buffer_is_measured_all_the_same(little, tmp_path):
    machine = measure_machine("x", num_threads=1, ram_bytes=10**9, folder=tmp_path)
    big = KernelShape("experts", "float32", (8, 2, 256, 512))
    wide = KernelShape("linear", "float32", (1024, 512))
    sizes = {
        entry.values for entry in measure_kernels(machine, [big, wide], num_threads=1).level(RAM).processor.efficiencies
    }
    assert sizes == {32 * 64, 3 * 256 * 512, 1024 * 512}


def test_a_models_shapes_are_its_matrices_experts_and_attention():
    costs = ModelCosts(SMALL, Formats(matrices="int4", embeddings="int8", kv="float32"))
    assert KernelShape("experts", "int4", (8, 2, 512, 512)) in shapes_of(costs)
    assert KernelShape("linear", "int8", (1000, 512)) in shapes_of(costs)
    assert KernelShape("attention", "float32", (8, 2, 64)) in shapes_of(costs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "int8", "is_known"),
    [(1.0, 1.0, True), (0.9, 1.1, True), (1.3, 1.0, False), (0.7, 1.0, False), (1.0, 0.7, False)],
)
def test_a_machine_that_became_slower_or_faster_is_measured_again(little, tmp_path, monkeypatch, read, int8, is_known):
    speeds = {"read": 1e9, "int8": 1e12}
    monkeypatch.setattr(
        kernel_bench.KernelBench, "roofs", lambda _: BestRates(speeds["read"], {"int8": speeds["int8"]}), raising=True
    )
    monkeypatch.setattr(calibrate, "GENERAL", ())
    monkeypatch.setattr(calibrate, "is_as_measured", is_as_measured)
    arguments = {"num_threads": 1, "ram_bytes": 10**9}
    first = this_machine.this_machine(tmp_path, **arguments)
    assert first.uncertainty == calibrate.MIN_UNCERTAINTY
    speeds["read"] *= read
    speeds["int8"] *= int8
    again = this_machine.this_machine(tmp_path, **arguments)
    assert again.level(RAM).read_bytes_per_s == (1e9 if is_known else speeds["read"])


@needs_kernels
def test_kernels_are_set_against_the_roofs_of_their_own_round(little, tmp_path, monkeypatch):
    speeds = cycle([1e9, 1e9, 2e9, 2e9, 4e9, 4e9])  # two samples a round: before and after the one shape
    work = KernelWork("linear", "int8", 1000.0, 2.0, 1, 1000)
    seconds = iter([2e-6, 1e-6, 0.5e-6])  # always half of the roof
    monkeypatch.setattr(kernel_bench.KernelBench, "roofs", lambda _: BestRates(next(speeds), {"int8": 1e15}))
    monkeypatch.setattr(kernel_bench.KernelBench, "measure", lambda *_: [(work, next(seconds))])
    machine = measure_machine("x", num_threads=1, ram_bytes=10**9, folder=tmp_path)
    assert machine.level(RAM).read_bytes_per_s == 2e9
    assert machine.uncertainty == 3.0
    (entry,) = machine.level(RAM).processor.efficiencies
    assert entry.share == pytest.approx(0.5)


@pytest.fixture
def fake_rounds(little, monkeypatch):
    """Have rounds read ever faster, 1 GB/s, 2 GB/s, ..., and measure nothing else."""
    speeds = iter(range(1, 100))
    monkeypatch.setattr(calibrate, "GENERAL", ())
    monkeypatch.setattr(kernel_bench.KernelBench, "roofs", lambda _: BestRates(next(speeds) * 1e9, {"int8": 1e12}))


@pytest.mark.parametrize(
    ("others", "num_rounds", "read", "other_work"),
    [
        ((0.0,), 3, 2e9, 0.0),
        ((0.5, 0.0), 4, 3e9, 0.0),  # the first is run again, and does not count
        ((0.4, 0.3, 0.2, 0.05, 0.9, 0.6), 6, 3e9, 0.2),  # never calm: rounds 2, 3 and 4 are the calmest
    ],
)
def test_rounds_beside_other_work_are_repeated_and_the_calmest_count(
    fake_rounds, tmp_path, monkeypatch, others, num_rounds, read, other_work
):
    others_take(monkeypatch, *others)
    steps: list[str] = []
    machine = measure_machine("x", num_threads=1, ram_bytes=10**9, folder=tmp_path, on_step=steps.append)
    assert sum(step.startswith("disk, ") for step in steps) == num_rounds
    assert machine.level(RAM).read_bytes_per_s == read
    assert machine.other_work == other_work
    assert this_machine.was_disturbed(machine) == (other_work > 0)
    assert machine_from_json(machine_to_json(machine), "x") == machine


def test_a_calm_measurement_stays_and_a_disturbed_one_is_made_again_once_it_is_calm(fake_rounds, tmp_path, monkeypatch):
    def now(others, *, is_fast=True, recalibrate=False):
        others_take(monkeypatch, others)
        monkeypatch.setattr(calibrate, "is_as_measured", lambda *_: is_fast)
        found = this_machine.this_machine(tmp_path, num_threads=1, ram_bytes=10**9, recalibrate=recalibrate)
        return found.level(RAM).read_bytes_per_s / 1e9, this_machine.was_disturbed(found)

    assert now(0.5) == (2, True)  # the first time: all six rounds are disturbed, and the earliest count
    assert now(0.5, is_fast=False) == (2, True)  # with other programs at work, no measurement is better
    assert now(0.0) == (8, False)
    assert now(0.5, is_fast=False) == (8, False)  # slower, for others are at work
    assert now(0.0) == (8, False)
    assert now(0.0, is_fast=False) == (11, False)  # slower or faster by itself
    assert now(0.5, recalibrate=True)[1]  # as the user says


def test_how_a_machine_was_measured_is_said_with_its_date():
    machine = Machine(name="x", levels=(), links=(), measured_at="2026-01-31T10:00+00:00", other_work=0.04)
    assert this_machine.how_measured(machine) == "measured 2026-01-31"
    disturbed = dataclasses.replace(machine, other_work=0.31)
    assert this_machine.how_measured(disturbed) == "measured 2026-01-31 while other work had 31% of the processor"
    assert this_machine.how_measured(dataclasses.replace(machine, measured_at="")) == ""


def test_rounds_that_take_long_are_not_repeated(fake_rounds, tmp_path, monkeypatch):
    others_take(monkeypatch, 0.5)
    monkeypatch.setattr(calibrate, "LONGEST_S", 0.0)
    steps: list[str] = []
    machine = measure_machine("x", num_threads=1, ram_bytes=10**9, folder=tmp_path, on_step=steps.append)
    assert sum(step.startswith("disk, ") for step in steps) == calibrate.NUM_ROUNDS
    assert this_machine.was_disturbed(machine)
