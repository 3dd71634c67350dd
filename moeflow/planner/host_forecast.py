"""This machine's known speed with a model, and the batches that it makes best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.engine_config import BLOCK_SIZE
from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, RAM, Machine
from moeflow.core.parallel_config import ParallelConfig
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.batching_choice import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DISK_NUM_BATCHED_TOKENS,
    Batching,
    choose_batching,
)
from moeflow.planner.choices.expert_plan import ExpertPlan
from moeflow.planner.choices.kv_cache_choice import kv_share
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.weight_choice import WeightChoice
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.rank_costs import Sharing
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.costs.work_space import work_bytes
from moeflow.planner.estimate import host_costs, min_expert_share
from moeflow.planner.known_routing import known_routing
from moeflow.planner.memory_budget import MemoryBudget
from moeflow.planner.search.objective import Objective
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine's speed is asked for."""

    costs: ModelCosts
    packed_file: Path | None  # that experts come from, once it is written; None: all fit into memory
    has_ranks: bool = False
    device: str = ""  # the GPU that computes, too; empty: none


MachineOf = Callable[[Wanted], Machine | None]


def unmeasured(_: Wanted) -> None:
    """Know nothing of the machine's speed."""
    return


class HostForecast:
    """A machine's speed, asked for once the weights are chosen."""

    def __init__(
        self,
        settings: Settings,
        usage: Usage,
        checkpoint: Checkpoint | None,
        machine_of: MachineOf,
        routing: RoutingProfile | None,
        budget: MemoryBudget,
        costs_of: Callable[[WeightChoice], ModelCosts],
    ) -> None:
        """`machine_of` returns how fast the machine is. `routing` None: learnt from the model's routers."""
        self.machine: Machine | None = None  # once it is asked for, if it is known
        self.routing = routing
        self._settings = settings
        self._usage = usage
        self._checkpoint = checkpoint
        self._machine_of = machine_of
        self._budget = budget
        self._costs_of = costs_of

    def ask(self, weights: WeightChoice, plan: ExpertPlan | None, cpu_isa: str, *, has_ranks: bool = False) -> None:
        """Learn how fast the machine is, and how its routers choose."""
        if not cpu_isa:
            return
        if self._checkpoint is not None and cpu_isa != extension.isa_name():  # machines have the best kernels' rates
            return
        file = None if plan is None else plan.packed_weights_file
        self.machine = self._machine_of(Wanted(costs=self._costs_of(weights), packed_file=file, has_ranks=has_ranks))
        if self.machine is not None:
            self.routing = self.routing or known_routing(self._checkpoint, self._settings.cache_dir)

    def ask_with_device(self, costs: ModelCosts, plan: ExpertPlan | None, device: str) -> None:
        """Learn how fast the machine and a GPU are that share experts, if both are known, and how routers choose."""
        file = None if plan is None else plan.packed_weights_file
        machine = self._machine_of(Wanted(costs=costs, packed_file=file, device=device))
        self.machine = machine if machine is not None and machine.has(DEVICE) else None
        self.routing = self.routing or known_routing(self._checkpoint, self._settings.cache_dir)

    def batching(
        self, default: Batching, weights: WeightChoice, plan: ExpertPlan | None, cpu_isa: str, reasons: Reasons
    ) -> Batching:
        """Return how many requests run concurrently, in passes of how many tokens; `default` where nothing is known."""
        settings, parallel = self._settings, self._budget.parallel
        if self.machine is None and (parallel is None or parallel.stages is None):
            self.ask(weights, plan, cpu_isa)
        num_tokens = settings.max_num_batched_tokens
        if plan is not None and (self.machine is None or self._usage.is_interactive):
            default = self._streamed_batching(weights, plan, default, reasons)
            num_tokens = default.max_num_batched_tokens
        if self.machine is None:
            return default
        try:
            chosen = choose_batching(
                self._usage,
                self._objective(weights, plan),
                self.cost_model_of(weights, self.machine, parallel, streams_experts=plan is not None),
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=num_tokens,
                streams_experts=plan is not None,
            )
        except CapacityError:
            if self._usage.reserves_kv:
                raise
            return default  # shorter requests than are planned for may fit
        reasons += chosen.reasons()
        return chosen

    def cost_model_of(
        self, weights: WeightChoice, machine: Machine, parallel: ParallelConfig | None, *, streams_experts: bool = False
    ) -> Callable[[int], CostModel]:
        """Return the costs of passes of so many tokens, with all experts in memory unless some come from disk."""
        costs = self._costs_of(weights)

        def model(num_tokens: int) -> CostModel:
            made = host_costs(
                costs,
                machine,
                self._usage.workload,
                routing=self.routing or EVEN_ROUTING,
                process_bytes=self._budget.process_bytes
                + work_bytes(costs.shape, num_tokens=num_tokens, num_sampled=0),
                chunk_tokens=num_tokens,
                sharing=Sharing(parallel=parallel, num_replicas=self._settings.num_replicas_here),
            )
            return made if streams_experts else replace(made, min_experts=1.0)

        return model

    def _objective(self, weights: WeightChoice, plan: ExpertPlan | None) -> Objective:
        """Return what batches are chosen by, within the memory that weights, keys and values may take."""
        limit = self._budget.free_bytes
        if plan is None and not self._usage.reserves_kv:
            left = max(self._budget.left(weights), 0.0)
            takes_all = self._settings.memory_bytes is not None and not self._settings.shares_memory
            limit -= int(left * (1 - kv_share(has_slots=False, takes_all=takes_all)))
        if plan is not None:  # slots are whole pages
            limit -= max(plan.min_bytes - ceil(self._least_bytes(weights)), 0)
        objective = self._usage.objective({RAM: limit})
        if plan is None or self._usage.is_interactive or self._usage.reserves_kv:
            return objective
        left_bytes = self._budget.left_for_kv(plan.min_bytes) * kv_share(has_slots=True, takes_all=False)
        most = (self._settings.kv_cache_bytes or left_bytes) // max(self.kv_bytes_of_request(weights), 1)
        return replace(objective, max_sequences=min(objective.max_sequences, max(int(most), 1)))

    def _least_bytes(self, weights: WeightChoice) -> float:
        """Return the bytes of weights that the cost model keeps in memory in any case."""
        costs = self._costs_of(weights)
        return costs.model_bytes - (1 - min_expert_share(costs)) * costs.experts_bytes

    def kv_bytes_of_request(self, weights: WeightChoice) -> int:
        """Return the bytes of keys and values of a request as long as the usage's are."""
        tokens = ceil(self._usage.workload.max_tokens / BLOCK_SIZE) * BLOCK_SIZE
        return int(tokens * self._costs_of(weights).kv_bytes)

    def _streamed_batching(
        self, weights: WeightChoice, plan: ExpertPlan, default: Batching, reasons: Reasons
    ) -> Batching:
        """Return how many tokens a pass may have whose experts come from disk; any prompt needs nearly all experts."""
        if self._settings.max_num_batched_tokens is not None:
            return default
        shape = self._costs_of(weights).shape
        left_bytes = self._budget.free_bytes - plan.min_bytes - self._budget.process_bytes
        for num_tokens in DISK_NUM_BATCHED_TOKENS:
            work = work_bytes(shape, num_tokens=num_tokens, num_sampled=default.max_num_seqs)
            if num_tokens > default.max_num_batched_tokens and work <= left_bytes // 8:
                reasons.append(("max_num_batched_tokens", f"{num_tokens}: a long prompt then reads its experts once"))
                return replace(default, max_num_batched_tokens=num_tokens)
        return default


def default_batching(settings: Settings, usage: Usage) -> Batching:
    """Return what holds where nothing is known of the machine's speed."""
    most = usage.num_sequences or usage.num_requests or DEFAULT_MAX_NUM_SEQS
    max_num_seqs = settings.max_num_seqs or min(most, DEFAULT_MAX_NUM_SEQS)
    num_tokens = settings.max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
    return Batching(max_num_seqs, num_tokens)
