"""How many experts stay resident: in slots of main memory, or in each layer's part of a device. Plain arithmetic.

While the engine runs, `experts/budget.py` measures memory and sizes the slots with the same rule (`num_slots_in`).
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Final

from moeflow.checkpoint.packed.file_io import whole_pages
from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.experts.slot_arena import arena_bytes, num_slots_in

if TYPE_CHECKING:
    from moeflow.planner.costs.hybrid_sizes import HybridSizes, Passes

SHARE_STEP: Final = 1e-6  # shares of experts are rounded to so much
_NUM_BUFFERED_LAYERS: Final = 2  # whose streamed experts a device holds: of the layer that computes, and of the next


def min_slots(top_k: int, num_experts: int) -> int:
    """Return how many of all experts must have a slot: those of a token, while the next layer's arrive."""
    return min(max(2 * top_k, 4), num_experts)


def num_slots(left_bytes: float, slab_bytes: int, num_experts: int, *, least: int) -> int:
    """Return how many of all experts have slots in so many bytes; `least` have in any case."""
    return min(max(num_slots_in(int(left_bytes), slab_bytes), least), num_experts)


def slots_within(left_bytes: int, slab_bytes: int, num_experts: int, *, least: int) -> int:
    """Return how many of all experts have slots in so many bytes. Raises: CapacityError for fewer than `least`."""
    if num_slots_in(left_bytes, slab_bytes) < least:
        need = format_bytes(arena_bytes(least, slab_bytes))
        raise CapacityError(
            f"{format_bytes(max(left_bytes, 0))} are left for experts, which need at least {need}: {least} experts "
            f"of {format_bytes(whole_pages(slab_bytes))} at a time. Raise the memory limit (--memory), or take a "
            "smaller weight format or KV cache"
        )
    return num_slots(left_bytes, slab_bytes, num_experts, least=least)


def host_slots(sizes: HybridSizes, have_bytes: int, passes: Passes) -> int | None:
    """Return the slots for experts in main memory of so many bytes; None: it holds all experts.

    Raises: CapacityError if too few experts fit.
    """
    if sizes.host_bytes(passes) <= have_bytes:
        return None
    least = min_slots(sizes.costs.shape.routing.top_k, sizes.num_in_all)
    left_bytes = have_bytes - sizes.host_bytes(passes, 0)
    return slots_within(left_bytes, sizes.slab_bytes, sizes.num_in_all, least=least)


def share_on_disk(num_resident: int, num_experts: int) -> float:
    """Return the share of experts that have no slot."""
    return max(1 - num_resident / num_experts, 0.0)


def share_to_evict(missing_bytes: float, experts_bytes: float) -> float:
    """Return the share of the experts, rounded up, whose eviction frees so many bytes."""
    return round(missing_bytes / experts_bytes + SHARE_STEP / 2, 6) if missing_bytes > 0 else 0.0


def share_on_device(layers_bytes: float, experts_bytes: float, share_of_layers: float) -> float:
    """Return the share of experts on a device that holds a share of the layers. Their other weights go first."""
    others_bytes = layers_bytes - experts_bytes
    return min(max(share_of_layers * layers_bytes - others_bytes, 0.0) / experts_bytes, 1.0)


def num_on_device(share: float, num_experts: int) -> int:
    """Return how many experts of a layer a share of them is."""
    return floor((share + SHARE_STEP) * num_experts)


def device_bytes(num_resident: int, num_layers: int, num_experts: int, expert_bytes: float) -> float:
    """Return what experts take of a device, if so many of each layer stay there and the others are streamed."""
    streamed = num_experts - num_resident
    return (num_resident * num_layers + _NUM_BUFFERED_LAYERS * streamed) * expert_bytes


def most_on_device(left_bytes: float, num_layers: int, num_experts: int, expert_bytes: float) -> int | None:
    """Return how many experts of each layer can stay on a device; None: streaming all of them does not fit either."""
    numbers = range(num_experts, -1, -1)
    return next((it for it in numbers if device_bytes(it, num_layers, num_experts, expert_bytes) <= left_bytes), None)
