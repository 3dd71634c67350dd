"""Main memory of an engine whose model a GPU computes: the process, and experts that the CPU computes."""

from __future__ import annotations

from typing import NamedTuple

from moeflow.core.engine_config import MemoryPlan
from moeflow.core.errors import CapacityError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_bytes
from moeflow.planner.choices.memory_allowance import free_bytes
from moeflow.planner.choices.weight_choice import instead_of
from moeflow.planner.costs.hybrid_sizes import HybridSizes, Passes
from moeflow.planner.costs.process_memory import CUDA_BYTES, margin_bytes, planned_bytes
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.resident_experts import host_slots
from moeflow.settings.settings import Settings


class MainMemory(NamedTuple):
    """The use of main memory."""

    plan: MemoryPlan
    num_slots: int | None  # for experts; None: it has all that the CPU computes


def planned_memory(
    settings: Settings, resources: HostResources, shape: ModelConfig, sizes: HybridSizes | None, passes: Passes
) -> MainMemory:
    """Return how main memory is used; `sizes` None: the GPU computes all experts.

    Within a limit that is too small for all experts, some have slots.

    Raises: CapacityError if there is less than the user allows, or if the process and the experts need more.
    """
    is_served = settings.is_served
    process_bytes = planned_bytes(resources.process_bytes, shape, is_served=is_served) + CUDA_BYTES
    process_bytes += margin_bytes(is_served=is_served)
    weight_bytes, num_slots = 0 if sizes is None else sizes.host_bytes(passes), None
    have_bytes = free_bytes(settings, resources, "cpu")
    if sizes is not None and settings.memory_bytes is not None:
        num_slots = host_slots(sizes, have_bytes - process_bytes, passes)
        weight_bytes = sizes.host_bytes(passes, num_slots)
    if process_bytes + weight_bytes > have_bytes:
        raise CapacityError(_why(settings, sizes, process_bytes, weight_bytes, have_bytes))
    plan = MemoryPlan(
        limit_bytes=have_bytes,
        process_bytes=process_bytes,
        weight_bytes=weight_bytes,
        work_bytes=0,
        is_served=is_served,
    )
    return MainMemory(plan, num_slots)


def _why(settings: Settings, sizes: HybridSizes | None, process_bytes: int, weight_bytes: int, have_bytes: int) -> str:
    """Return the message for too little main memory."""
    is_limited = settings.memory_bytes is not None
    have = f"{format_bytes(have_bytes)} are {'allowed' if is_limited else 'free'}"
    more = "raise the memory limit (--memory)" if is_limited else "free memory"
    if sizes is None:
        return f"the process beside a GPU needs {format_bytes(process_bytes)} of memory, but {have}: {more}"
    return (
        f"all experts must be in memory, where the CPU computes those that the GPU does not: "
        f"{format_bytes(weight_bytes)} in {sizes.host_format} and the process {format_bytes(process_bytes)} more, but "
        f"{have}: use {instead_of(sizes.host_format)}, {more}, or limit memory (--memory): "
        "experts without room then come from disk"
    )
