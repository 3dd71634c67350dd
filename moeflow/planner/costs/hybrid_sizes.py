"""Memory where a device holds some experts of each layer and the host all others or some. Knows no machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Final, NamedTuple

from moeflow.core.hybrid_config import HybridConfig, host_staging_bytes
from moeflow.experts.slot_arena import arena_bytes
from moeflow.planner.costs.gpu_work_space import graph_bytes, pass_bytes
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.process_memory import PROCESS_BYTES

FLOAT_BYTES: Final = 4  # of a value that the host computes with
NUM_RINGS: Final = 4  # buffers of hidden states between the host and the device: two each way


class Passes(NamedTuple):
    """The largest passes."""

    num_tokens: int
    num_seqs: int


@dataclass(frozen=True)
class HybridSizes:
    """The bytes of a model whose experts a device and its host share."""

    costs: ModelCosts  # on the device
    host_format: str  # of the experts that the host computes

    @cached_property
    def on_host(self) -> ModelCosts:
        """The costs of experts on the host."""
        formats = replace(self.costs.formats, matrices=self.host_format, is_planar=False)
        return replace(self.costs, formats=formats)

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.costs.shape.routing.num_experts

    @property
    def row_bytes(self) -> int:
        """The bytes of a token's hidden states on their way between the device and the host."""
        return self.costs.shape.hidden_size * FLOAT_BYTES

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slot in main memory."""
        return ceil(self.on_host.largest_expert_bytes)

    @property
    def num_in_all(self) -> int:
        """Experts of all layers."""
        return self.costs.num_moe_layers * self.num_experts

    def host_bytes(self, passes: Passes, num_slots: int | None = None) -> int:
        """Return the main memory of all experts, or of slots for some, and of buffers of passes."""
        experts_bytes = ceil(self.on_host.experts_bytes)
        if num_slots is not None:
            staging_bytes = host_staging_bytes(self.num_experts, self.slab_bytes)
            experts_bytes = arena_bytes(num_slots, self.slab_bytes) + staging_bytes
        return experts_bytes + NUM_RINGS * passes.num_tokens * self.row_bytes

    def device_bytes(self, num_gpu_experts: int, passes: Passes, kv_bytes: float) -> int:
        """Return the device's memory with so many experts of each layer."""
        costs = self.costs
        slots_bytes = costs.num_moe_layers * num_gpu_experts * costs.expert_bytes + self._staging_bytes(num_gpu_experts)
        work_bytes = pass_bytes(costs, num_tokens=passes.num_tokens, num_sampled=passes.num_seqs)
        work_bytes += graph_bytes(costs, passes.num_seqs)
        return ceil(costs.model_bytes - costs.experts_bytes + slots_bytes + kv_bytes + work_bytes + PROCESS_BYTES)

    def _staging_bytes(self, num_gpu_experts: int) -> int:
        """Return the bytes on the device for experts on their way there."""
        config = HybridConfig(
            num_gpu_experts=num_gpu_experts, cpu_weight_format=self.host_format, cpu_isa="", stream_tokens=1
        )
        packed, slot = self.on_host.expert_bytes, self.costs.expert_bytes
        return config.staging_bytes(self.num_experts, ceil(packed), ceil(slot))

    def most_gpu_experts(self, capacity_bytes: int, passes: Passes, kv_bytes: float) -> int | None:
        """Return how many experts of each layer fit on a device; None: the other weights do not fit either."""
        numbers = range(self.num_experts - 1, -1, -1)
        return next((it for it in numbers if self.device_bytes(it, passes, kv_bytes) <= capacity_bytes), None)
