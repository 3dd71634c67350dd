"""The experts of all layers on the ranks of a group, and how they move from one rank to another between passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import GATHERED_BYTES, WHOLE, ParallelConfig
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.models.layers.ranks.rank_experts import RankExperts
from moeflow.parallel.group import Group
from moeflow.parallel.placement.expert_balancer import ExpertBalancer
from moeflow.parallel.placement.rebalancing import ReplicaMove
from moeflow.parallel.placement.whole_experts import WholeExperts


class ExpertRanks:
    """Which rank has which experts, the same on all ranks, and this rank's part of them."""

    def __init__(self, group: Group, balancer: ExpertBalancer, gathered_bytes: float = GATHERED_BYTES) -> None:
        """Take the ranks, the placement of experts on them, and the bytes that a layer exchanges at once."""
        self.balancer, self._gathered_bytes = balancer, gathered_bytes
        self._group = group
        self._layers: list[RankExperts] = []
        self._memory: list[LazyMemory | None] = []

    @classmethod
    def of(cls, shape: ModelConfig, parallel: ParallelConfig, group: Group, layers: range) -> ExpertRanks | None:
        """Return the first placement of experts on the ranks that share some layers, and whether they move.

        None: no rank has whole ones. Blocks: where another package says it, until ranks know that they agree.
        Raises: ConfigError if that layout cannot be used; GroupError.
        """
        if not shape.routing.num_experts or parallel.has_slices:
            return None
        own = shape.moe_numbers_in(layers)
        recorded = np.array(parallel.expert_loads, float)[own] if parallel.expert_loads and own else None
        experts = WholeExperts.of(parallel, group.size, len(own), shape.routing.num_experts, recorded)
        if parallel.expert_layout != WHOLE:
            group.barrier(f"experts as {parallel.expert_layout} lays them out ({experts.digest})")
        # Between two exchanges of a layer, a rank with little work would wait for the other half of the pass.
        return cls(group, ExpertBalancer(experts), inf if parallel.alternating_tokens else GATHERED_BYTES)

    def add_layer(self, experts: PackedExperts, memory: LazyMemory | None) -> RankExperts:
        """Return the next layer's experts; `memory` holds them; None: a file with all of them."""
        layer = RankExperts(experts, len(self._layers), self.balancer, self._group, self._gathered_bytes)
        self._layers.append(layer)
        self._memory.append(memory)
        return layer

    def end_pass(self) -> None:
        """Move experts if loads call for it. Then it waits for the other ranks. Raises: GroupError."""
        steps = self.balancer.end_pass()
        if not steps:
            return
        self._copy(steps)
        self.balancer.switch(steps)
        for layer in {step.layer for step in steps}:
            self._layers[layer].place()
        for step in steps:
            if step.from_rank == self._group.rank:
                self._give_back(step)

    def _copy(self, steps: Sequence[ReplicaMove]) -> None:
        """Send the weights of each step's expert from its owner to its new rank."""
        mine = self._group.rank
        travels = [(step, self._source(step)) for step in steps if step.to_rank is not None]
        parts = [
            self._rows([step for step, source in travels if (source, step.to_rank) == (mine, rank)])
            for rank in range(self._group.size)
        ]
        received = [iter(rows) for rows in self._group.all_to_all(_name_of(steps), parts)]
        for step, source in travels:
            if step.to_rank == mine:
                self._keep(step, next(received[source]))

    def _source(self, step: ReplicaMove) -> int:
        return self.balancer.placement.homes[step.layer][step.expert][0] if step.from_rank is None else step.from_rank

    def _rows(self, steps: Sequence[ReplicaMove]) -> Tensor:
        """Return the weights of some experts, [N, bytes]; those of all layers take the same."""
        rows = [self._layers[step.layer].weights_of(step.expert) for step in steps]
        return torch.stack(rows) if rows else self._layers[0].weights_of(0).new_empty(0, self._layers[0].expert_bytes)

    def _keep(self, step: ReplicaMove, weights: Tensor) -> None:
        """Take weights over; a file has them already, but not every rank's machine need have one."""
        if self._memory[step.layer] is not None:
            self._layers[step.layer].weights_of(step.expert).copy_(weights)

    def _give_back(self, step: ReplicaMove) -> None:
        """Free the memory of an expert that this rank has no more."""
        memory, weights = self._memory[step.layer], self._layers[step.layer].weights_of(step.expert)
        if memory is not None:
            start = weights.data_ptr() - memory.tensor.data_ptr()
            memory.give_back(start, start + len(weights))


def _name_of(steps: Sequence[ReplicaMove]) -> str:
    """Return a full description of the exchange: ranks that decide differently must notice, not confuse experts."""
    each = (f"{step.expert} of MoE layer {step.layer} from {step.from_rank} to {step.to_rank}" for step in steps)
    return f"experts {', '.join(each)}"
