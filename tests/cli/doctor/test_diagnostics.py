import types
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from moeflow.cli import lazy
from moeflow.cli.doctor import diagnostics
from moeflow.cli.doctor.diagnostics import Finding, Verdict
from moeflow.core.hardware import DEVICE, RAM, Link, LinkRate, MemoryLevel, Processor
from moeflow.core.hardware import Machine as Described
from moeflow.core.units import GIB
from moeflow.planner.hardware.host import HostResources


def machine(available: int = 8 * GIB, accelerator: str | None = None) -> HostResources:
    return HostResources(4, 16 * GIB, available, accelerator, 0)


@pytest.mark.parametrize(
    ("info", "verdict", "found"),
    [
        ({"flags": "fpu avx2 fma avx512f"}, Verdict.OK, "avx2 fma avx512f"),
        ({"flags": "fpu sse2"}, Verdict.WARN, "none known"),
        ({"Features": "fp asimd i8mm"}, Verdict.OK, "asimd i8mm"),
        ({}, Verdict.WARN, "none known"),
    ],
)
def test_instructions_that_matter_are_told(info, verdict, found):
    finding = diagnostics.instruction_set(info)
    assert (finding.verdict, finding.found) == (verdict, found)


def test_little_memory_is_a_warning_with_a_remedy():
    assert diagnostics.memory(machine()).verdict is Verdict.OK
    finding = diagnostics.memory(machine(available=GIB))
    assert finding.verdict is Verdict.WARN
    assert finding.found == "1.0 GiB free of 16.0 GiB"
    assert "2.0 GiB" in finding.remedy


@pytest.mark.parametrize("setting", ["always [madvise] never\n", "[always] madvise never\n"])
def test_large_pages_that_are_given_out_are_fine(tmp_path, setting):
    file = tmp_path / "enabled"
    file.write_text(setting)
    (finding,) = diagnostics.large_pages(file)
    assert finding.verdict is Verdict.OK
    assert finding.found.startswith(setting.split("[")[1].split("]")[0])


def test_large_pages_that_are_switched_off_are_a_warning_with_a_remedy(tmp_path):
    file = tmp_path / "enabled"
    file.write_text("always madvise [never]\n")
    (finding,) = diagnostics.large_pages(file)
    assert finding.verdict is Verdict.WARN
    assert finding.found.startswith("never: ")
    assert finding.remedy == f"As root: echo madvise > {file}"


@pytest.mark.parametrize("content", [None, b"", b"who knows", b"\xff[never]"])
def test_a_system_that_does_not_say_is_not_judged(tmp_path, content):
    file = tmp_path / "enabled"
    if content is not None:
        file.write_bytes(content)
    assert diagnostics.large_pages(file) == []


def test_a_cache_folder_that_does_not_exist_yet_is_judged_by_its_parent(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    asked = []
    monkeypatch.setattr(diagnostics.shutil, "disk_usage", lambda folder: asked.append(folder) or usage(GIB))
    finding = diagnostics.disk(tmp_path / "a" / "b")
    assert asked == [tmp_path]
    assert finding.verdict is Verdict.WARN
    assert "--cache-dir" in finding.remedy


def test_a_cache_folder_that_cannot_be_written_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnostics.os, "access", lambda folder, mode: False)
    finding = diagnostics.disk(tmp_path)
    assert finding.verdict is Verdict.MISSING
    assert "MOEFLOW_CACHE" in finding.remedy


def test_a_package_that_is_not_installed_is_missing(monkeypatch):
    monkeypatch.setattr(diagnostics, "NEEDED_PACKAGES", ("click", "no-such-package"))
    by_topic = {finding.topic: finding for finding in diagnostics.packages()}
    assert by_topic["python"].verdict is Verdict.OK
    assert by_topic["click"].verdict is Verdict.OK
    assert by_topic["no-such-package"].verdict is Verdict.MISSING
    assert by_topic["no-such-package"].remedy


def test_broken_torch_is_a_finding_not_a_crash(monkeypatch):
    def broken(*_: object) -> HostResources:
        raise ImportError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setitem(vars(lazy), "host_resources", broken)
    (finding,) = diagnostics.hardware("")
    assert finding.verdict is Verdict.MISSING
    assert "libgomp" in finding.found


def test_a_machine_without_accelerator_is_fine(monkeypatch):
    monkeypatch.setitem(vars(lazy), "host_resources", lambda *_: machine())
    by_topic = {finding.topic: finding for finding in diagnostics.hardware("")}
    assert by_topic["accelerator"].verdict is Verdict.OK
    assert by_topic["processor"].found.endswith("4 cores to use")


def test_a_driver_without_torch_for_it_is_a_warning(tmp_path):
    (tmp_path / "version").touch()
    (finding,) = diagnostics.accelerator(machine(), tmp_path / "version")
    assert finding.verdict is Verdict.WARN
    assert "finds no CUDA device" in finding.found
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy
    here = replace(machine(), why_no_accelerator="torch is the build for CPUs; pip install another")
    (finding,) = diagnostics.accelerator(here, tmp_path / "version")
    assert "torch is the build for CPUs; none; models run on the processor" in finding.found
    assert finding.remedy == "pip install another"


def measured(device, capacity_bytes):
    processor = Processor(name="a GPU", peak_flops_per_s=(("float32", 5e13), ("bfloat16", 7e14)))
    level = MemoryLevel(name=DEVICE, capacity_bytes=capacity_bytes, read_bytes_per_s=4.1e12, processor=processor)
    ways = ((RAM, DEVICE, 5.5e10), (DEVICE, RAM, 5e10))
    rates = [(source, target, (LinkRate(transfer_bytes=1, bytes_per_s=rate),)) for source, target, rate in ways]
    return level, *(Link(source=source, target=target, rates=rate) for source, target, rate in rates)


def test_a_gpu_is_measured(monkeypatch):
    monkeypatch.setitem(vars(lazy), "measure_device", measured)
    found = diagnostics.accelerator(replace(machine(accelerator="cuda"), accelerator_free_bytes=16 * GIB))
    assert found[0].found == "a GPU, 16.0 GiB free, reads 4100 GB/s, 700 TFLOP/s in bfloat16"
    assert found[1].found == "55.0 GB/s there, 50.0 back"
    assert "experimental" in found[2].found


def test_a_gpu_without_kernels_is_a_warning(monkeypatch):
    monkeypatch.setitem(vars(lazy), "measure_device", measured)
    here = replace(machine(accelerator="cuda"), why_no_kernels="Failed to find C compiler.; x; install gcc")
    (finding,) = (it for it in diagnostics.accelerator(here) if it.topic == "its kernels")
    assert finding.verdict is Verdict.WARN
    assert "do not run there: Failed to find C compiler.; x. Models run on the processor" in finding.found
    assert finding.remedy == "install gcc"


def test_a_gpu_without_room_is_a_warning(monkeypatch):
    def full(*_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setitem(vars(lazy), "measure_device", full)
    (finding,) = diagnostics.accelerator(machine(accelerator="cuda"))
    assert finding.verdict is Verdict.WARN
    assert "cannot be measured: CUDA out of memory" in finding.found


def kernels(is_available: bool) -> types.SimpleNamespace:
    """Stand in for the extension's face."""

    def best_isa(cap: str) -> str:
        if cap not in ("", "generic", "avx2"):
            raise ValueError(f"unknown instruction set: {cap}")
        return cap or "avx2"

    return types.SimpleNamespace(
        is_available=lambda: is_available,
        why_not=lambda: "the extension is not installed",
        best_isa=best_isa,
        ISAS=("generic", "avx2"),
    )


def test_installed_kernels_say_what_they_use(monkeypatch):
    monkeypatch.setitem(vars(lazy), "cpu", kernels(is_available=True))
    assert diagnostics.cpu_kernels("") == Finding("CPU kernels", Verdict.OK, "installed, for avx2")
    assert diagnostics.cpu_kernels("generic").found == "installed, for generic"


def test_a_wrong_instruction_set_says_which_there_are(monkeypatch):
    monkeypatch.setitem(vars(lazy), "cpu", kernels(is_available=True))
    finding = diagnostics.cpu_kernels("avx3")
    assert (finding.verdict, finding.found) == (Verdict.MISSING, "unknown instruction set: avx3")
    assert "generic, avx2" in finding.remedy


@pytest.mark.parametrize(
    ("compiler", "remedy"),
    [
        ("clang++", diagnostics.REINSTALL),
        (None, "Install a C++ compiler (g++ or clang++), then moeflow again"),
    ],
)
def test_without_kernels_it_is_said_how_to_get_them(monkeypatch, compiler, remedy):
    monkeypatch.setitem(vars(lazy), "cpu", kernels(is_available=False))
    monkeypatch.setattr(diagnostics.shutil, "which", lambda name: name if name == compiler else None)
    finding = diagnostics.cpu_kernels("")
    assert (finding.verdict, finding.remedy) == (Verdict.WARN, remedy)
    assert finding.found == "the extension is not installed; plain torch computes, which is slower"


def test_this_machine_can_be_examined():
    topics = [finding.topic for finding in diagnostics.examine(Path.home(), "")]
    assert {"python", "torch", "processor", "memory", "disk"} <= set(topics)


@pytest.mark.parametrize(
    ("other_work", "verdict", "found", "remedy"),
    [
        (0.02, Verdict.OK, "measured 2026-01-31: reads 43 GB/s; `moeflow plan --recalibrate` measures it again", None),
        (
            0.4,
            Verdict.WARN,
            "measured 2026-01-31 while other work had 40% of the processor: reads 43 GB/s",
            "Expected speeds are too low. A start while nothing else runs measures again; so does `moeflow plan`",
        ),
    ],
)
def test_when_and_beside_what_this_machine_was_measured_is_told(monkeypatch, other_work, verdict, found, remedy):
    ram = MemoryLevel(name=RAM, capacity_bytes=1, read_bytes_per_s=43e9)
    known = Described(name="x", levels=(ram,), links=(), measured_at="2026-01-31T10:00+00:00", other_work=other_work)
    monkeypatch.setitem(vars(lazy), "known_machine", lambda *_: known)
    (finding,) = diagnostics.calibration(Path("/nowhere"))
    assert (finding.verdict, finding.found, finding.remedy) == (verdict, found, remedy)


def test_a_machine_that_was_never_measured_is_told_how(tmp_path):
    (finding,) = diagnostics.calibration(tmp_path)
    assert finding.verdict is Verdict.OK
    assert finding.found == "not measured yet; `moeflow plan` does it when it is first used"
