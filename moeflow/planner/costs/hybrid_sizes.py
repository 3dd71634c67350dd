"""Memory where a device holds some experts of each layer and the host all of them. Knows no machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Final

from moeflow.core.hybrid_config import HybridConfig
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES
from moeflow.planner.costs.gpu_work_space import graph_bytes
from moeflow.planner.costs.model_costs import ModelCosts

FLOAT_BYTES: Final = 4  # of a value that the host computes with
NUM_RINGS: Final = 4  # buffers of hidden states between the host and the device: two each way


@dataclass(frozen=True)
class HybridSizes:
    """The bytes of a model whose experts a device and its host share."""

    costs: ModelCosts  # on the device
    host_format: str  # of the experts that the host computes

    @cached_property
    def on_host(self) -> ModelCosts:
        """The costs of experts on the host."""
        return replace(self.costs, formats=replace(self.costs.formats, matrices=self.host_format, layers=()))

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.costs.shape.routing.num_experts

    @property
    def row_bytes(self) -> int:
        """The bytes of a token's hidden states on their way between the device and the host."""
        return self.costs.shape.hidden_size * FLOAT_BYTES

    def host_bytes(self, num_tokens: int) -> int:
        """Return the main memory of all experts, and of the buffers of passes over so many tokens."""
        return ceil(self.on_host.experts_bytes) + NUM_RINGS * num_tokens * self.row_bytes

    def device_bytes(self, num_gpu_experts: int, num_tokens: int, kv_bytes: float) -> int:
        """Return the device's memory with so many experts of each layer, for passes over so many tokens."""
        costs = self.costs
        slots_bytes = costs.num_moe_layers * num_gpu_experts * costs.expert_bytes + self._staging_bytes(num_gpu_experts)
        beside = DEVICE_RESERVE_BYTES + costs.activation_bytes(num_tokens) + graph_bytes(costs, num_tokens)
        return ceil(costs.model_bytes - costs.experts_bytes + slots_bytes + kv_bytes + beside)

    def _staging_bytes(self, num_gpu_experts: int) -> int:
        """Return the bytes on the device for experts on their way there."""
        config = HybridConfig(
            num_gpu_experts=num_gpu_experts, cpu_weight_format=self.host_format, cpu_isa="", stream_tokens=1
        )
        packed, slot = self.on_host.expert_bytes, self.costs.expert_bytes
        return config.staging_bytes(self.num_experts, ceil(packed), ceil(slot))

    def most_gpu_experts(self, capacity_bytes: int, num_tokens: int, kv_bytes: float) -> int | None:
        """Return how many experts of each layer fit on a device; None: the other weights do not fit either."""
        numbers = range(self.num_experts - 1, -1, -1)
        return next((it for it in numbers if self.device_bytes(it, num_tokens, kv_bytes) <= capacity_bytes), None)
