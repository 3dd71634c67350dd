"""What computes: the device, the instruction set of the CPU kernels and the number of threads, each with its reason."""

from __future__ import annotations

from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import torch
from moeflow.planner.hardware.host import HostResources

ANY_ISA: Final = "generic"  # of a plan for a model without weights here

Reasons = list[tuple[str, str]]  # the name of a choice, and why it was made


def no_cuda(device: str, machine: HostResources) -> ConfigError:
    """Return what to raise where a GPU is asked for and there is none."""
    return ConfigError(
        f"device {device} is asked for, but {machine.why_no_accelerator}. Use --device cpu, or emulate a GPU "
        "that is smaller than the model: --device emulated:16GiB,12 (its memory, and GB/s of its link)"
    )


def choose_device(requested: str, machine: HostResources) -> str:
    """Return where torch keeps tensors. Raises: ConfigError if it is unknown, or not there."""
    if requested == "cpu":
        return requested
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise ConfigError(f"device {requested!r} is unknown; use cpu or cuda") from None
    if device.type == "cuda" and machine.accelerator is None:
        raise no_cuda(requested, machine)
    return str(device)


def choose_cpu_isa(requested: str, device: str, reasons: Reasons) -> str:
    """Return the CPU kernels' instruction set, at most `requested`; empty if torch computes. Raises: ConfigError."""
    if device != "cpu":
        return ""
    if not extension.is_available():
        reasons.append(("cpu_isa", f"torch computes: {extension.why_not()}"))
        return ""
    try:
        return extension.best_isa(requested)
    except ValueError as error:
        raise ConfigError(f"{error}; known are {', '.join(extension.ISAS)}") from None


def choose_num_threads(requested: int | None, machine: HostResources, reasons: Reasons) -> int:
    """Return how many threads compute: one a core, unless the user says otherwise."""
    if requested is None:
        reasons.append(("num_threads", f"{machine.num_cores}: one a core"))
    return requested or machine.num_cores
