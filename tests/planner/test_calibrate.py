"""That measuring measures, on little; what the figures are is the machine's business."""

from __future__ import annotations

from itertools import cycle

import pytest

from moeflow.core.hardware import DISK, RAM
from moeflow.kernels import cpu
from moeflow.planner import calibrate, disk_rates, kernel_bench, this_machine
from moeflow.planner.calibrate import is_as_measured, measure_kernels, measure_machine
from moeflow.planner.disk_rates import disk_bench
from moeflow.planner.kernel_bench import KernelShape, Roofs, shapes_of
from moeflow.planner.model_costs import Formats, ModelCosts, Work
from tests.planner.examples import SMALL

needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason=cpu.why_not())
SHAPES = (
    KernelShape("linear", "int8", (32, 64)),
    KernelShape("experts", "bfloat16", (4, 2, 64, 32)),
    KernelShape("attention", "float32", (4, 2, 16)),
)


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(kernel_bench, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(kernel_bench, "TOKENS", (1, 4))
    monkeypatch.setattr(kernel_bench, "LEAST_S", 0.0)
    monkeypatch.setattr(calibrate, "GENERAL", SHAPES[:1])
    monkeypatch.setattr(calibrate, "GLANCE_S", 0.0)
    monkeypatch.setattr(disk_rates, "LEAST_S", 0.001)
    monkeypatch.setattr(disk_rates, "FILE_BYTES", 2**22)
    monkeypatch.setattr(this_machine, "is_as_measured", lambda *_: True)  # so little is measured badly


def test_disk_is_measured_by_size_and_depth_and_nothing_is_left(little, tmp_path):
    with disk_bench(tmp_path) as disk:
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
    assert {"disk, 1 of 3", "linear in int8, 3 of 3"} <= set(steps)
    known = machine.level(RAM).processor.efficiencies
    assert {(entry.kernel, entry.dtype, entry.rows, entry.values) for entry in known} == {
        ("linear", "int8", rows, 32 * 64) for rows in (1, 4)
    }
    assert all(0 < entry.share < 100 for entry in known)
    more = this_machine.this_machine(tmp_path, **arguments, shapes=SHAPES)
    entries = more.level(RAM).processor.efficiencies
    assert set(entries) > set(known)
    assert {entry.kernel for entry in entries} == {"linear", "experts", "attention"}
    monkeypatch.setattr(this_machine, "measure_machine", None)
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
        this_machine, "measure_machine", lambda *args, **others: count.append(1) or original(*args, **others)
    )
    this_machine.this_machine(tmp_path, **arguments)
    assert not count
    this_machine.this_machine(tmp_path, **arguments, is_fresh=True)
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
        kernel_bench.KernelBench, "roofs", lambda _: Roofs(speeds["read"], {"int8": speeds["int8"]}), raising=True
    )
    monkeypatch.setattr(calibrate, "GENERAL", ())
    monkeypatch.setattr(this_machine, "is_as_measured", is_as_measured)
    arguments = {"num_threads": 1, "ram_bytes": 10**9}
    first = this_machine.this_machine(tmp_path, **arguments)
    assert first.uncertainty == calibrate.LEAST_UNCERTAINTY
    speeds["read"] *= read
    speeds["int8"] *= int8
    again = this_machine.this_machine(tmp_path, **arguments)
    assert again.level(RAM).read_bytes_per_s == (1e9 if is_known else speeds["read"])


@needs_kernels
def test_kernels_are_set_against_the_roofs_of_their_own_round(little, tmp_path, monkeypatch):
    speeds = cycle([1e9, 1e9, 2e9, 2e9, 4e9, 4e9])  # two samples a round: before and after the one shape
    work = Work("linear", "int8", 1000.0, 2.0, 1, 1000)
    seconds = iter([2e-6, 1e-6, 0.5e-6])  # always half of the roof
    monkeypatch.setattr(kernel_bench.KernelBench, "roofs", lambda _: Roofs(next(speeds), {"int8": 1e15}))
    monkeypatch.setattr(kernel_bench.KernelBench, "measure", lambda *_: [(work, next(seconds))])
    machine = measure_machine("x", num_threads=1, ram_bytes=10**9, folder=tmp_path)
    assert machine.level(RAM).read_bytes_per_s == 2e9
    assert machine.uncertainty == 3.0
    (entry,) = machine.level(RAM).processor.efficiencies
    assert entry.share == pytest.approx(0.5)
