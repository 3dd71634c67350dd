import types
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from moeflow.cli import lazy
from moeflow.cli.doctor import diagnostics
from moeflow.cli.doctor.diagnostics import Finding, Verdict
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, RAM, KernelEfficiency, Link, LinkRate, MemoryLevel, Processor
from moeflow.core.hardware import Machine as Described
from moeflow.core.units import GIB, MIB
from moeflow.planner.hardware.gpu_figures import GpuFigures, figures_file
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.hardware.machine_files import load_machine


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
    assert by_topic["accelerator"].found == "none; models run on the processor, which computes all experts"
    assert by_topic["processor"].found.endswith("4 cores to use")


def test_a_driver_without_torch_for_it_is_a_warning(tmp_path):
    (tmp_path / "version").touch()
    (finding,) = diagnostics.accelerator(machine(), tmp_path, tmp_path / "version")
    assert finding.verdict is Verdict.WARN
    assert "finds no CUDA device" in finding.found
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy
    here = replace(machine(), why_no_accelerator="torch is the build for CPUs; pip install another")
    (finding,) = diagnostics.accelerator(here, tmp_path, tmp_path / "version")
    assert "torch is the build for CPUs; none; models run on the processor" in finding.found
    assert finding.remedy == "pip install another"


def figures(name, capacity_bytes, file):
    processor = Processor(
        name="a GPU", peak_flops_per_s=(("float32", 5e13), ("bfloat16", 7e14)), launch_s=2.5e-6, seam_s=2e-5
    )
    level = MemoryLevel(name=DEVICE, capacity_bytes=capacity_bytes, read_bytes_per_s=4.1e12, processor=processor)
    ways = ((RAM, DEVICE, 5.5e10), (DEVICE, RAM, 5e10))
    sizes = ((64 * MIB, 1), (MIB, 2))
    rates = [
        (source, target, tuple(LinkRate(transfer_bytes=size, bytes_per_s=rate / part) for size, part in sizes))
        for source, target, rate in ways
    ]
    return GpuFigures(level, *(Link(source=source, target=target, rates=rate) for source, target, rate in rates))


def test_a_gpu_is_measured(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setitem(vars(lazy), "gpu_figures", lambda *given: asked.append(given) or figures(*given))
    monkeypatch.setitem(vars(lazy), "known_machine", lambda *_: load_machine("l4"))
    here = replace(machine(accelerator="cuda"), accelerator_free_bytes=16 * GIB)
    found = {it.topic: it.found for it in diagnostics.accelerator(here, tmp_path)}
    speeds = "reads 4100 GB/s, 700 TFLOP/s in bfloat16, a kernel each 2.5 µs"
    assert found["accelerator"] == f"a GPU, 16.0 GiB free, {speeds}"
    assert found["link to it"] == "55.0 GB/s there, 50.0 back (1.0 MiB at a time: 27.5 GB/s there, 25.0 back)"
    assert found["round trip"].startswith("20.0 µs to the CPU and back")
    assert found["CPU's experts"] == "not measured yet"
    assert "experimental" in found["larger models"]
    assert asked == [("cuda:0", 16 * GIB, figures_file(tmp_path, here, "cuda:0"))]


def test_measured_rates_of_experts_are_those_of_plans(monkeypatch, tmp_path):
    ram = load_machine("l4").level(RAM)
    measured = [
        KernelEfficiency(kernel="experts", dtype=name, rows=1, share=share)
        for name, share in (("int4", 0.25), ("bfloat16", 0.5))
    ]
    fast = replace(ram.processor, launch_s=0.0, efficiencies=tuple(measured), peak_flops_per_s=(("float32", 1e15),))
    known = Described(name="here", levels=(replace(ram, read_bytes_per_s=8e10, processor=fast),))
    monkeypatch.setitem(vars(lazy), "gpu_figures", figures)
    monkeypatch.setitem(vars(lazy), "known_machine", lambda *_: known)
    (found,) = (
        it for it in diagnostics.accelerator(machine(accelerator="cuda"), tmp_path) if it.topic == "CPU's experts"
    )
    assert found.found == "reads one token's experts in int4 20, bfloat16 40 GB/s"


def test_a_gpu_without_kernels_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setitem(vars(lazy), "gpu_figures", figures)
    here = replace(machine(accelerator="cuda"), why_no_kernels="Failed to find C compiler.; x; install gcc")
    (finding,) = (it for it in diagnostics.accelerator(here, tmp_path) if it.topic == "its kernels")
    assert finding.verdict is Verdict.WARN
    assert "do not run there: Failed to find C compiler.; x. Models run on the processor" in finding.found
    assert finding.remedy == "install gcc"


def test_a_gpu_without_room_is_a_warning(monkeypatch, tmp_path):
    def full(*_):
        raise ConfigError("cuda:0 cannot be measured: CUDA out of memory")

    monkeypatch.setitem(vars(lazy), "gpu_figures", full)
    (finding,) = diagnostics.accelerator(machine(accelerator="cuda"), tmp_path)
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
