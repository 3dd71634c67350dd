"""How a model that is larger than its GPU runs there: some experts on the GPU, all others on the CPU."""

from __future__ import annotations

from typing import Final

import msgspec

from moeflow.core.units import MIB

_SET_BYTES: Final = 64 * MIB  # of a set of staged experts at most, if that is one expert or more


class HybridConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a hybrid model. All other weights are on the GPU."""

    num_gpu_experts: int  # slots of a layer on the GPU; 0: the CPU computes all experts
    cpu_weight_format: str  # of the experts that the CPU computes: a `WeightFormat`
    cpu_isa: str  # instruction set of the kernels that compute them
    stream_tokens: int  # a pass of as many tokens copies experts to the GPU; 0: none does
    popularity_file: str = ""  # a trace of routing, see workload/routing_trace.py; empty: unknown at the start
    packed_experts_file: str = ""  # packed weights with these experts; empty: the start packs them

    def staging_bytes(self, num_experts: int, packed_bytes: int, slot_bytes: int) -> int:
        """Return the bytes on the GPU for experts on their way to their layer.

        Packed experts arrive in two sets, or one at a time where none are streamed. A change of layout takes two copies
        of a set in the larger layout, and the last set has the layout of slots. The arguments are the experts of a
        layer, and the bytes of one in each layout.
        """
        count = staged_experts(num_experts - self.num_gpu_experts, packed_bytes) if self.stream_tokens else 0
        changing_bytes = 2 * max(count, 1) * max(packed_bytes, slot_bytes)
        return (1 + 2 * count) * packed_bytes + changing_bytes + count * slot_bytes


def host_staging_bytes(num_experts: int, packed_bytes: int) -> int:
    """Return the bytes of main memory, at most, for experts on their way from disk to the GPU."""
    return (1 + 2 * staged_experts(num_experts, packed_bytes)) * packed_bytes


def staged_experts(num_cold: int, packed_bytes: int) -> int:
    """Return the experts of one set, where a layer has so many without a slot."""
    return min(max(_SET_BYTES // packed_bytes, 1), num_cold)
