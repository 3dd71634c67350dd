"""This machine's resources as findings: each has the result, a verdict, and a remedy.

Measures with the same eyes as the engine does, so that both speak of the same memory. Knows nothing of models.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from moeflow.cli import lazy
from moeflow.core.cache_dir import cache_folder, existing_folder
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import RAM
from moeflow.core.offload_config import parse_cuda_device
from moeflow.core.units import GIB, format_bytes

if TYPE_CHECKING:
    from moeflow.planner.hardware.host import HostResources

MIN_FREE_RAM = 2 * GIB  # the built-in model in bfloat16 with a small KV cache
MIN_FREE_DISK = 2 * GIB  # the built-in model takes 1.3
REINSTALL = "Install moeflow again: `make clean run` does it"
NEEDED_PACKAGES = ("torch", "tokenizers", "safetensors", "fastapi")
LARGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COMPILERS = ("g++", "clang++")
CPU_FLAGS = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "i8mm",
    "bf16",
)


class Verdict(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    WARN = "warn"  # works, but slower or with less
    MISSING = "missing"  # something that is needed


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    topic: str
    verdict: Verdict
    found: str
    remedy: str | None = None


def examine(cache_dir: Path, cpu_isa: str) -> list[Finding]:
    """Look at everything that running a model needs. `cpu_isa` caps the instruction set; empty: the best there is."""
    return [*packages(), *hardware(cpu_isa, cache_dir), disk(cache_dir), *calibration(cache_dir)]


def packages() -> list[Finding]:
    """Return which versions of Python and of the packages that do the work are installed."""
    findings = [Finding("python", Verdict.OK, f"{platform.python_version()} at {sys.executable}")]
    for name in NEEDED_PACKAGES:
        try:
            findings.append(Finding(name, Verdict.OK, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, Verdict.MISSING, "not installed", REINSTALL))
    return findings


def hardware(cpu_isa: str, cache_dir: Path | None = None) -> list[Finding]:
    """Return what there is to compute with. `cache_dir` remembers trials of GPUs; None: the user's own."""
    try:
        machine = lazy.host_resources("auto", cache_dir)
    except ImportError as error:
        return [Finding("hardware", Verdict.MISSING, f"torch cannot be loaded: {error}", REINSTALL)]
    info = _cpu_info()
    name = info.get("model name") or platform.processor() or platform.machine()
    return [
        Finding("processor", Verdict.OK, f"{name}, {machine.num_cores} cores to use"),
        instruction_set(info),
        cpu_kernels(cpu_isa),
        memory(machine),
        *large_pages(),
        *accelerator(machine, cache_dir),
    ]


def _cpu_info(file: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the first processor's entries; empty where the system does not tell."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def instruction_set(info: dict[str, str]) -> Finding:
    """Return which instructions that speed up matrix products there are."""
    flags = (info.get("flags") or info.get("Features") or "").split()
    found = [flag for flag in CPU_FLAGS if flag in flags]
    if "avx2" in found or "asimd" in found:
        return Finding("instructions", Verdict.OK, " ".join(found))
    return Finding(
        "instructions",
        Verdict.WARN,
        " ".join(found) or "none known",
        "Without AVX2 (x86) or NEON (ARM) models run, but slowly",
    )


def cpu_kernels(cpu_isa: str) -> Finding:
    """Return whether the extension that computes on CPUs is there, and which of the instructions it uses."""
    if lazy.cpu.is_available():
        try:
            return Finding("CPU kernels", Verdict.OK, f"installed, for {lazy.cpu.best_isa(cpu_isa)}")
        except ValueError as error:
            remedy = f"Let MOEFLOW_CPU_ISA be one of {', '.join(lazy.cpu.ISAS)}, or unset it"
            return Finding("CPU kernels", Verdict.MISSING, str(error), remedy)
    has_compiler = any(shutil.which(name) for name in COMPILERS)
    remedy = REINSTALL if has_compiler else f"Install a C++ compiler ({' or '.join(COMPILERS)}), then moeflow again"
    found = f"{lazy.cpu.why_not()}; plain torch computes, which is slower"
    return Finding("CPU kernels", Verdict.WARN, found, remedy)


def memory(machine: HostResources) -> Finding:
    """Return how much RAM there is and how much of it is free."""
    found = f"{format_bytes(machine.available_bytes)} free of {format_bytes(machine.total_bytes)}"
    if machine.available_bytes >= MIN_FREE_RAM:
        return Finding("memory", Verdict.OK, found)
    remedy = f"Free {format_bytes(MIN_FREE_RAM)} for the built-in model, or use a smaller one"
    return Finding("memory", Verdict.WARN, found, remedy)


def large_pages(setting: Path = LARGE_PAGES_SETTING) -> list[Finding]:
    """Return whether programs can request memory in large pages; None if the system does not report it."""
    try:
        chosen = re.search(r"\[(\w+)\]", setting.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return []
    if chosen is None:
        return []
    if chosen[1] != "never":
        return [Finding("large pages", Verdict.OK, f"{chosen[1]}: memory that asks for them lies on them")]
    found = "never: what is not mapped from packed weights lies on pages of 4 KiB, so decoding is slower"
    return [Finding("large pages", Verdict.WARN, found, f"As root: echo madvise > {setting}")]


def _kernels_of(machine: HostResources) -> list[Finding]:
    """Return why a GPU computes without Triton's kernels, if it does."""
    if not machine.why_no_kernels:
        return []
    found, _, remedy = machine.why_no_kernels.rpartition("; ")
    found = f"Triton's kernels do not run there: {found}. Models run on the processor, or slower with --device cuda"
    return [Finding("its kernels", Verdict.WARN, found, remedy)]


def accelerator(
    machine: HostResources, cache_dir: Path | None, driver: Path = Path("/proc/driver/nvidia/version")
) -> list[Finding]:
    """Return whether torch sees a GPU, and its figures, which `cache_dir` keeps. A machine needs none."""
    if machine.accelerator is None:
        found = "none; models run on the processor, which computes all experts"
        if not driver.exists():
            return [Finding("accelerator", Verdict.OK, found)]
        why, has_remedy, remedy = machine.why_no_accelerator.rpartition("; ")
        if not has_remedy:
            why, remedy = remedy, "Let this process see the GPU: CUDA_VISIBLE_DEVICES or a container may hide it"
        found = f"a driver for NVIDIA's GPUs, but torch {lazy.torch.__version__}: {why}; {found}"
        return [Finding("accelerator", Verdict.WARN, found, remedy)]
    free = format_bytes(machine.accelerator_free_bytes)
    name = parse_cuda_device(machine.accelerator)[0]
    try:
        file = lazy.figures_file(cache_dir, machine, name)
        figures = lazy.gpu_figures(name, machine.accelerator_free_bytes, file)
    except ConfigError as error:
        remedy = "Free some of its memory: other programs may use it"
        return [Finding("accelerator", Verdict.WARN, f"{free} free, but {error}", remedy)]
    assert figures.level.processor is not None
    speeds, copies, seam = lazy.device_rates(figures)
    return [
        Finding("accelerator", Verdict.OK, f"{figures.level.processor.name}, {free} free, {speeds}"),
        *_kernels_of(machine),
        Finding("link to it", Verdict.OK, copies),
        Finding("round trip", Verdict.OK, seam),
        *_experts_of_processor(machine, cache_dir),
        Finding("larger models", Verdict.WARN, "--device cuda:SIZE streams weights that do not fit; experimental"),
    ]


def _experts_of_processor(machine: HostResources, cache_dir: Path | None) -> list[Finding]:
    """Return how fast the processor computes experts that a GPU has no memory for."""
    known = lazy.known_machine(cache_folder(cache_dir), machine.num_cores)
    rates = "" if known is None else lazy.expert_rates(known)
    remedy = None if rates else "`moeflow plan` measures them"
    return [Finding("CPU's experts", Verdict.OK, rates or "not measured yet", remedy)]


def calibration(cache_dir: Path) -> list[Finding]:
    """Return when this machine's speed was measured, on which plans and expectations rest, and whether calmly."""
    try:
        known = lazy.known_machine(cache_dir, lazy.host_resources().num_cores)
    except ImportError:  # said of the hardware
        return []
    if known is None:
        found = "not measured yet; `moeflow plan` does it when it is first used"
        return [Finding("its speed", Verdict.OK, found)]
    speed = f"reads {known.level(RAM).read_bytes_per_s / 1e9:.0f} GB/s"
    found = f"{lazy.how_measured(known)}: {speed}"
    if lazy.was_disturbed(known):
        remedy = "Expected speeds are too low. A start while nothing else runs measures again; so does `moeflow plan`"
        return [Finding("its speed", Verdict.WARN, found, remedy)]
    return [Finding("its speed", Verdict.OK, f"{found}; `moeflow plan --recalibrate` measures it again")]


def kept_prompts(folder: Path) -> list[Finding]:
    """Return what the prompt cache has, if there is one."""
    try:
        num_bytes = lazy.folder_bytes(folder)
    except OSError as error:
        remedy = "Make the folder yours, or choose another with --prompt-cache"
        return [Finding("prompt cache", Verdict.WARN, f"{folder} cannot be read: {error.strerror or error}", remedy)]
    found = f"{format_bytes(num_bytes)} at {folder}; `moeflow cache` shows and clears it"
    return [Finding("prompt cache", Verdict.OK, found)] if num_bytes else []


def disk(cache_dir: Path) -> Finding:
    """Return the free space for built models."""
    existing = existing_folder(cache_dir)
    free = shutil.disk_usage(existing).free
    found = f"{format_bytes(free)} free at {cache_dir}"
    if not os.access(existing, os.W_OK):
        return Finding(
            "disk",
            Verdict.MISSING,
            f"{existing} cannot be written",
            "Choose another folder with --cache-dir or MOEFLOW_CACHE",
        )
    if free >= MIN_FREE_DISK:
        return Finding("disk", Verdict.OK, found)
    return Finding(
        "disk", Verdict.WARN, found, f"Free {format_bytes(MIN_FREE_DISK)}, or choose another folder with --cache-dir"
    )
