"""How much memory the engine may use: what the user allows, if it is there."""

from __future__ import annotations

from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.planner.hardware.host import HostResources
from moeflow.settings.settings import Settings


def free_bytes(settings: Settings, machine: HostResources, device: str) -> int:
    """Return what the engine may use of the devices that compute, as much of each.

    Raises: CapacityError if the user allows more memory than there is.
    """
    allowed, on_device = settings.memory_bytes, settings.gpu_memory_bytes
    if device == "cpu":
        have = machine.available_bytes
        if allowed is not None:
            have += machine.process_bytes  # which the limit covers, too
        return allowed_bytes("memory", allowed, have)
    number = settings.num_ranks or 1
    have = min(machine.accelerators_free_bytes[:number], default=0)
    return number * allowed_bytes("device memory", on_device, have)


def allowed_bytes(what: str, requested: int | None, have: int) -> int:
    """Return the limit that the user set, else what there is. Raises: CapacityError if the first is more."""
    if requested is not None and requested > have:
        raise CapacityError(
            f"a {what} limit of {format_bytes(requested)} is asked for, but {format_bytes(have)} are free: "
            "ask for less or free memory"
        )
    return have if requested is None else requested
