"""A start measures only missing figures, keeps them until all are measured, and survives any failure."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from moeflow.core import apart
from moeflow.core.hardware import DISK, RAM
from moeflow.kernels.cpu import extension
from moeflow.planner.hardware import (
    calibrate,
    disk_rates,
    kernel_bench,
    quick_calibration,
    this_machine,
)
from moeflow.planner.hardware.hardware_json import machine_from_json, machine_to_json
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.hardware.kernel_bench import ROW_OPERATIONS, KernelShape
from moeflow.planner.hardware.measuring_process import measure_apart
from moeflow.planner.hardware.pass_bench import NO_ENGINE
from moeflow.planner.hardware.this_machine import (
    MachineNeeds,
    how_measured,
    known_machine,
    machine_file,
    machine_for_start,
    machine_identity,
)
from tests.planner.hardware.other_processes import others_take

needs_kernels = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
LINEAR = KernelShape("linear", "int8", (32, 64))
OTHER = KernelShape("linear", "int8", (32, 128))
HERE = {"num_threads": 1, "ram_bytes": 10**9}


@pytest.fixture
def counted(monkeypatch):
    """Have little measured, and return what was: kernels' shapes, "engine" and "disk"."""
    monkeypatch.setattr(kernel_bench, "BUFFER_BYTES", 2**20)
    quick = dataclasses.replace(kernel_bench.QUICK, tokens=(1, 4), num_passes=1)
    full = dataclasses.replace(kernel_bench.THOROUGH, tokens=(1,), min_s=0.0, num_passes=1)
    monkeypatch.setattr(quick_calibration, "QUICK", quick)
    monkeypatch.setattr(calibrate, "THOROUGH", full)
    monkeypatch.setattr(calibrate, "GENERAL", (LINEAR,))
    monkeypatch.setattr(disk_rates, "MIN_S", 0.001)
    monkeypatch.setattr(calibrate, "disk_bench", partial(disk_rates.disk_bench, file_bytes=2**22))
    monkeypatch.setattr(disk_rates, "QUICK_FILE_BYTES", 2**22)
    monkeypatch.setattr(calibrate, "is_as_measured", lambda *_: True)
    monkeypatch.setattr(this_machine, "CALM_S", 0.0)
    monkeypatch.setattr(this_machine, "TOO_UNCERTAIN", 1e9)  # so little is measured badly
    others_take(monkeypatch, 0.0)
    found = []

    def note(place, name, what):
        original = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args: found.append(what(*args)) or original(*args))

    note(kernel_bench.KernelBench, "measure", lambda _, shape: shape)
    monkeypatch.setattr(calibrate, "measure_engine", lambda *_: found.append("engine") or NO_ENGINE)
    note(disk_rates.DiskBench, "sample", lambda *_: "disk")
    return found


def start(cache_dir, shapes=(LINEAR,), *, needs_disk=False, **others):
    return machine_for_start(cache_dir, MachineNeeds(**HERE, shapes=shapes, disk=needs_disk), **others)


@needs_kernels
def test_what_the_model_needs_is_measured_once(counted, tmp_path):
    steps = []
    machine = start(tmp_path, on_step=steps.append)
    assert counted == [LINEAR, ROW_OPERATIONS, "engine"]
    assert steps
    assert machine.is_quick
    assert not machine.has(DISK)
    assert machine.uncertainty >= quick_calibration.MIN_UNCERTAINTY
    assert machine.level(RAM).capacity_bytes == 10**9
    assert how_measured(machine).startswith(f"measured quickly {machine.measured_at[:10]}")
    assert 0 < machine.level(RAM).processor.default_efficiency <= 1
    counted.clear()
    assert start(tmp_path) == machine
    assert counted == []
    assert known_machine(tmp_path, 1) == machine


@needs_kernels
def test_what_is_lacking_is_added(counted, tmp_path):
    first = start(tmp_path)
    counted.clear()
    second = start(tmp_path, (LINEAR, OTHER))
    assert counted == [OTHER]
    assert set(second.level(RAM).processor.efficiencies) > set(first.level(RAM).processor.efficiencies)
    assert second.level(RAM).read_bytes_per_s == first.level(RAM).read_bytes_per_s
    counted.clear()
    third = start(tmp_path, needs_disk=True)
    assert counted == ["disk"]
    assert third.has(DISK)
    assert third.level(RAM).processor.efficiencies == second.level(RAM).processor.efficiencies
    counted.clear()
    assert start(tmp_path, (OTHER,), needs_disk=True) == third
    assert counted == []
    assert machine_from_json(machine_file(tmp_path, 1).read_bytes(), "it") == third


@pytest.mark.slow
@needs_kernels
def test_a_full_description_takes_the_place_of_a_quick_one_and_stays(counted, tmp_path):
    start(tmp_path)
    full = this_machine.this_machine(tmp_path, **HERE)
    assert not full.is_quick
    assert full.has(DISK)
    assert "quickly" not in how_measured(full)
    counted.clear()
    assert start(tmp_path, (OTHER,), needs_disk=True) == full
    assert counted == []
    assert machine_for_start(tmp_path, MachineNeeds(num_threads=1, ram_bytes=7)).level(RAM).capacity_bytes == 7
    machine_file(tmp_path, 1).write_text("{")
    assert start(tmp_path).is_quick
    assert known_machine(tmp_path, 1).is_quick


@needs_kernels
@pytest.mark.parametrize("kept", ["", "{", '{"name": "x"}', "[]", "\x00"])
def test_what_is_kept_but_damaged_is_measured_again(counted, tmp_path, kept):
    file = machine_file(tmp_path, 1)
    file.parent.mkdir()
    file.write_text(kept)
    machine = start(tmp_path)
    assert "engine" in counted
    assert known_machine(tmp_path, 1) == machine


@needs_kernels
def test_a_folder_that_cannot_be_written_stops_nothing(counted, tmp_path):
    folder = tmp_path / "file"
    folder.write_text("no folder")
    machine = start(folder, needs_disk=True)
    assert machine.level(RAM).read_bytes_per_s > 0
    assert "assumed" in dict(machine.sources)[DISK]
    assert machine.link(DISK, RAM).peak_bytes_per_s == quick_calibration.ASSUMED_DISK_BYTES_PER_S
    assert "disk" not in counted
    assert not start(folder).has(DISK)


@needs_kernels
def test_a_full_disk_stops_nothing(counted, tmp_path, monkeypatch):
    def is_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_rates.os, "fsync", is_full)
    monkeypatch.setattr(type(tmp_path), "write_text", is_full)
    machine = start(tmp_path, needs_disk=True)
    assert "No space left on device" in dict(machine.sources)[DISK]
    assert list(tmp_path.rglob("*.*")) == []


@pytest.mark.parametrize("needs_disk", [False, True])
def test_without_kernels_figures_are_assumed_and_not_kept(counted, tmp_path, monkeypatch, needs_disk):
    monkeypatch.setattr(extension, "is_available", lambda: False)
    machine = start(tmp_path, needs_disk=needs_disk)
    assert machine.has(DISK) == needs_disk
    assert machine.uncertainty == quick_calibration.ASSUMED_UNCERTAINTY
    assert "assumed" in dict(machine.sources)["all"]
    assert how_measured(machine) == ""
    assert counted == []
    assert known_machine(tmp_path, 1) is None
    assert machine.identity == machine_identity(1)


@needs_kernels
def test_where_measuring_fails_figures_are_assumed(counted, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_bench, "LEAST_BUFFER_BYTES", 1 << 60)
    monkeypatch.setattr(kernel_bench, "BUFFER_BYTES", 1 << 60)
    machine = start(tmp_path)
    assert "measuring failed" in dict(machine.sources)["all"]


@pytest.mark.slow
@needs_kernels
def test_a_process_of_its_own_measures_the_same_once(counted, tmp_path, monkeypatch):
    steps = []
    others_take(monkeypatch, 1.0)  # so that a disturbed measurement stays
    machine = start(tmp_path, needs_disk=True, measure=measure_apart, on_step=steps.append)
    assert counted == []
    assert steps
    assert machine.has(DISK)
    measured = {(it.kernel, it.dtype, it.values) for it in machine.level(RAM).processor.efficiencies}
    assert ("linear", "int8", LINEAR.values) in measured
    assert start(tmp_path, needs_disk=True, measure=measure_apart) == machine
    assert start(tmp_path, needs_disk=True) == machine
    assert counted == []


@pytest.mark.parametrize("needs_disk", [False, True])
def test_where_the_process_of_a_measurement_dies_figures_are_assumed(tmp_path, monkeypatch, needs_disk):
    monkeypatch.setattr(apart.sys, "executable", "/bin/false")
    machine = start(tmp_path, needs_disk=needs_disk, measure=measure_apart)
    assert "ended early" in dict(machine.sources)["all"]
    assert machine.has(DISK) == needs_disk
    assert known_machine(tmp_path, 1) is None


@needs_kernels
def test_measurements_take_no_more_memory_than_is_free(counted, tmp_path, monkeypatch):
    here = host_resources()
    monkeypatch.setattr(kernel_bench, "LEAST_BUFFER_BYTES", 2**18)
    free_bytes = kernel_bench.KEPT_FREE_BYTES + 2**19
    monkeypatch.setattr(kernel_bench, "host_resources", lambda: dataclasses.replace(here, available_bytes=free_bytes))
    assert kernel_bench.KernelBench(1, kernel_bench.QUICK)._buffer.nbytes == 2**19
    monkeypatch.setattr(kernel_bench, "LEAST_BUFFER_BYTES", 2**20)
    assert "96.5 MiB are free" in dict(start(tmp_path).sources)["all"]


@needs_kernels
def test_beside_other_work_the_calmest_of_some_rounds_counts(counted, tmp_path, monkeypatch):
    others_take(monkeypatch, 0.6, 0.05)
    assert start(tmp_path).other_work == 0.05
    assert counted == [LINEAR, ROW_OPERATIONS, "engine"] * 2
    others_take(monkeypatch, 0.6, 0.3, 0.4)
    assert start(tmp_path / "never calm").other_work == 0.3
    assert counted == [LINEAR, ROW_OPERATIONS, "engine"] * 5


@needs_kernels
@pytest.mark.parametrize("is_full", [False, True])
def test_what_was_measured_beside_other_work_is_measured_again_at_a_calm_start(counted, tmp_path, monkeypatch, is_full):
    others_take(monkeypatch, 0.65)
    first = start(tmp_path)
    if is_full:
        first = dataclasses.replace(first, is_quick=False)
        machine_file(tmp_path, 1).write_text(machine_to_json(first))
    assert this_machine.is_provisional(first)
    counted.clear()
    assert start(tmp_path) == first  # others are still at work
    assert counted == []
    others_take(monkeypatch, 0.0)
    second = start(tmp_path)
    assert counted == [LINEAR, ROW_OPERATIONS, "engine"]
    assert not this_machine.is_provisional(second)
    counted.clear()
    assert start(tmp_path) == second
    assert counted == []


@needs_kernels
def test_a_second_measurement_that_is_disturbed_more_is_not_kept(counted, tmp_path, monkeypatch):
    others_take(monkeypatch, 0.3)
    first = start(tmp_path)
    others_take(monkeypatch, 0.0, 0.0, 0.7)  # two looks find calm, then others come
    counted.clear()
    assert start(tmp_path) == first
    assert counted
    assert known_machine(tmp_path, 1) == first


@needs_kernels
def test_what_a_busy_start_adds_makes_all_provisional(counted, tmp_path, monkeypatch):
    assert not this_machine.is_provisional(start(tmp_path))
    others_take(monkeypatch, 0.5)
    assert this_machine.is_provisional(start(tmp_path, (LINEAR, OTHER)))
    others_take(monkeypatch, 0.0)
    assert not this_machine.is_provisional(start(tmp_path, (LINEAR, OTHER)))


@needs_kernels
def test_rounds_that_differ_by_a_factor_are_provisional(counted, tmp_path, monkeypatch):
    speeds = iter([1e9, 1.9e9, 1.5e9])
    rates = lambda _: kernel_bench.BestRates(next(speeds), {"int8": 1e12})  # noqa: E731
    monkeypatch.setattr(kernel_bench.KernelBench, "roofs", rates)
    monkeypatch.setattr(this_machine, "TOO_UNCERTAIN", 0.8)
    others_take(monkeypatch, 0.5, 0.4, 0.05)
    machine = start(tmp_path)
    assert machine.other_work == 0.05
    assert machine.uncertainty == pytest.approx(0.9)
    assert this_machine.is_provisional(machine)
