"""The choices for this machine, made in order, each with its reason. Only headers of the model are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig, MemoryPlan, SchedulerConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.hardware import RAM, Machine
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.units import format_bytes
from moeflow.kernels.cpu import extension
from moeflow.models.layers.rank_experts import expert_blocks
from moeflow.planner.choices.batching_choice import Batching, choose_batching
from moeflow.planner.choices.expert_plan import ExpertPlan
from moeflow.planner.choices.join_choice import choose_join
from moeflow.planner.choices.kv_cache_choice import choose_kv_cache, kv_share, min_kv_bytes, num_kept_blocks
from moeflow.planner.choices.memory_allowance import free_bytes
from moeflow.planner.choices.packed_files import find_packed_weights_file
from moeflow.planner.choices.processor_choice import Reasons, choose_cpu_isa, choose_device, choose_num_threads
from moeflow.planner.choices.weight_choice import WeightChoice, explicit_choice, for_torch, instead_of, own_precision
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.process_memory import PROCESS_BYTES, margin_bytes, planned_bytes
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.costs.work_space import work_bytes
from moeflow.planner.estimate import host_costs
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.known_routing import known_routing
from moeflow.planner.search.objective import Objective
from moeflow.planner.settings import (
    BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DISK_NUM_BATCHED_TOKENS,
    Settings,
)
from moeflow.planner.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a machine's speed is asked for."""

    costs: ModelCosts
    packed_file: Path | None  # that experts come from, once it is written; None: all have room in memory


MachineOf = Callable[[Wanted], Machine | None]


def unmeasured(_: Wanted) -> None:
    """Know nothing of the machine's speed."""
    return


class Decision:
    """The choices, made in order, each with its reason."""

    def __init__(
        self,
        settings: Settings,
        usage: Usage,
        resources: HostResources,
        checkpoint: Checkpoint,
        shape: ModelConfig,
        machine_of: MachineOf,
        *,
        routing: RoutingProfile | None = None,
        offloads_to_torch: bool = False,
    ) -> None:
        """`offloads_to_torch`: this is for the host of a device that computes in torch."""
        self.settings = settings
        self.usage = usage
        self.offloads_to_torch = offloads_to_torch
        self.resources = resources
        self.shape = shape
        self.checkpoint = checkpoint
        self.machine_of = machine_of
        self.routing = routing
        self.machine: Machine | None = None  # once its speed is asked for, if that is known
        self.reasons: Reasons = []

    def config(self) -> EngineConfig:
        """Make all choices. Raises: ConfigError, CapacityError, CheckpointError."""
        settings, reasons = self.settings, self.reasons
        device = choose_device(settings.device, self.resources, reasons)
        self.free_bytes = free_bytes(settings, self.resources, device)
        cpu_isa = "" if self.offloads_to_torch else choose_cpu_isa(settings.cpu_isa, device, reasons)
        batching = _default_batching(settings, self.usage)
        self._set_beside_weights(cpu_isa, batching)
        weights = self._weights(device, can_pack=bool(cpu_isa))
        dtype = "float32" if cpu_isa else weights.matrices
        is_limited = bool(cpu_isa and settings.memory_bytes)
        plan = self._expert_plan(weights, dtype) if is_limited else None
        batching = self._batching(batching, weights, plan, cpu_isa)
        self._set_beside_weights(cpu_isa, batching)
        weight_bytes = self._check_weights(weights, plan)
        num_ranks = self._num_ranks(cpu_isa, plan)
        join = choose_join(settings, num_ranks, reasons)
        num_here = num_ranks if join is None else 1
        share = kv_share(has_slots=plan is not None, is_limited=is_limited)
        attends_in_torch = device != "cpu" or self.offloads_to_torch or not extension.is_available()
        cache = choose_kv_cache(
            self._with_reserved_kv(weights, batching.max_num_seqs),
            self.shape,
            torch_dtype=dtype if attends_in_torch else None,
            left_bytes=self._left_for_kv(weights, weight_bytes, num_here),
            share=share,
            max_num_seqs=batching.max_num_seqs,
            reasons=reasons,
        )
        num_threads = choose_num_threads(settings.num_threads, self.resources, reasons)
        return EngineConfig(
            model_path=str(self.checkpoint.path),
            model_name=settings.model_name or self.checkpoint.path.stem,
            dtype=dtype,
            weight_format=weights.matrices,
            embedding_format=weights.embeddings,
            router_format=weights.routers,
            is_wide=weights.is_exact,
            cpu_isa=cpu_isa,
            kv_dtype=cache.dtype,
            device=device,
            num_threads=max(num_threads // num_here, 1),
            scheduler=SchedulerConfig(
                block_size=BLOCK_SIZE,
                num_blocks=cache.num_blocks,
                max_model_len=cache.max_model_len,
                max_num_seqs=batching.max_num_seqs,
                max_num_batched_tokens=batching.max_num_batched_tokens,
                prefix_caching=settings.prefix_caching,
                num_kept_blocks=None if plan is None else num_kept_blocks(settings, cache, share),
            ),
            kv_cache_bytes=cache.num_bytes,
            experts=None if plan is None else self._expert_slots(plan),
            packed_file=self._packed_file(weights) if cpu_isa and plan is None else "",
            parallel=ParallelConfig(num_ranks=num_ranks, join=join) if num_ranks > 1 else None,
            device_memory_bytes=settings.device_memory_bytes or 0,
            memory=self._memory_plan(weight_bytes if plan is None else plan.resident_bytes),
            record_routing=self._record_routing(),
            graph_file=_absolute(settings.graph_file),
            trace_file=_absolute(settings.trace_file),
        )

    def _left_for_kv(self, weights: WeightChoice, weight_bytes: int, num_ranks: int) -> int:
        """Return the bytes from which each rank here may take its keys and values; it has all weights but experts."""
        costs = self._costs(weights)
        of_each = self._overhead_bytes + int(costs.model_bytes - costs.experts_bytes)
        left_bytes = self.free_bytes - weight_bytes - self._overhead_bytes - (num_ranks - 1) * of_each
        return max(left_bytes, 0) // num_ranks

    def _num_ranks(self, cpu_isa: str, plan: ExpertPlan | None) -> int:
        """Return how many processes share the experts. Raises: ConfigError where they cannot."""
        number = self.settings.num_ranks or 1
        if number == 1:
            return 1
        if not cpu_isa or self.offloads_to_torch:
            raise ConfigError("ranks (--ranks) compute with the CPU's kernels: leave --device away, or use one rank")
        if plan is not None:
            raise ConfigError(
                "ranks (--ranks) keep their experts in memory, but --memory is too little: allow more, or use one rank"
            )
        if number > self.shape.num_experts:
            what = f"only {self.shape.num_experts} experts" if self.shape.num_experts else "no experts"
            raise ConfigError(f"{number} ranks (--ranks) cannot share the layers of a model with {what}: use fewer")
        sizes = {len(block) for block in expert_blocks(self.shape.num_experts, number)}
        each = " or ".join(map(str, sorted(sizes)))
        self.reasons.append(("ranks", f"{number}: each has {each} of the {self.shape.num_experts} experts of a layer"))
        return number

    def _weight_bytes(self, weights: WeightChoice) -> int:
        """Return the bytes of the weights that this machine has: without the experts of ranks on others."""
        num_bytes = weights.num_bytes(self.checkpoint)
        if self.settings.listen_ranks is None:
            return num_bytes
        return num_bytes - int(self._costs(weights).others_bytes(self.settings.num_ranks or 1))

    def _record_routing(self) -> str:
        """Return the file for what routers choose. Raises: ConfigError if there are no routers."""
        if self.settings.record_routing is not None and not self.shape.num_experts:
            raise ConfigError("this is a dense model: it has no routing to record (--record-routing)")
        return _absolute(self.settings.record_routing)

    def _set_beside_weights(self, cpu_isa: str, batching: Batching) -> None:
        """Set what processes will hold, and a pass's work space; both matter to the byte only within a limit."""
        if not cpu_isa or self.settings.memory_bytes is None:
            self.process_bytes, self.work_bytes = PROCESS_BYTES, 0
            return
        is_served = self.settings.is_served
        held_bytes = planned_bytes(self.resources.process_bytes, self.shape, is_served=is_served)
        self.process_bytes = held_bytes + margin_bytes(is_served=is_served)
        self.work_bytes = work_bytes(
            self.shape, num_tokens=batching.max_num_batched_tokens, num_sampled=batching.max_num_seqs
        )

    def _batching(self, default: Batching, weights: WeightChoice, plan: ExpertPlan | None, cpu_isa: str) -> Batching:
        """Return how many requests run together, in passes of how many tokens."""
        is_alone = (self.settings.num_ranks or 1) == 1
        if is_alone and cpu_isa and cpu_isa == extension.isa_name():  # measured is one process with the best kernels
            file = None if plan is None else plan.packed_weights_file
            self.machine = self.machine_of(Wanted(costs=self._costs(weights), packed_file=file))
        if self.machine is None:
            return default if plan is None else self._streamed_batching(plan, default)
        self.routing = self.routing or known_routing(self.checkpoint, self.settings.cache_dir)
        try:
            chosen = choose_batching(
                self.usage,
                self._objective(weights, plan),
                self._cost_model_of(self._costs(weights), self.machine),
                max_num_seqs=self.settings.max_num_seqs,
                max_num_batched_tokens=self.settings.max_num_batched_tokens,
            )
        except CapacityError:
            if self.usage.reserves_kv:
                raise
            return default  # shorter requests than are planned for may have room
        self.reasons += chosen.reasons()
        return chosen

    def _objective(self, weights: WeightChoice, plan: ExpertPlan | None) -> Objective:
        """Return what batches are chosen by, within the memory that weights, keys and values may take."""
        limit = self.free_bytes
        if plan is None and not self.usage.reserves_kv:
            left = max(self._left(weights), 0.0)
            limit -= int(left * (1 - kv_share(has_slots=False, is_limited=self.settings.memory_bytes is not None)))
        return self.usage.objective({RAM: limit})

    def _costs(self, weights: WeightChoice) -> ModelCosts:
        kv_dtype = "float32" if self.settings.kv_dtype == "auto" else self.settings.kv_dtype
        formats = Formats(
            matrices=weights.matrices, embeddings=weights.embeddings, kv=kv_dtype, routers=weights.routers
        )
        return ModelCosts(self.shape, formats)

    def _cost_model_of(self, costs: ModelCosts, machine: Machine) -> Callable[[int], CostModel]:
        """Return the costs of passes of so many tokens."""

        def model(num_tokens: int) -> CostModel:
            return host_costs(
                costs,
                machine,
                self.usage.workload,
                routing=self.routing or EVEN_ROUTING,
                process_bytes=self.process_bytes + work_bytes(self.shape, num_tokens=num_tokens, num_sampled=0),
                chunk_tokens=num_tokens,
            )

        return model

    def _with_reserved_kv(self, weights: WeightChoice, max_num_seqs: int) -> Settings:
        """Return the settings, with a KV cache for just the workload if that is what it is for."""
        settings = self.settings
        if not self.usage.reserves_kv:
            return settings
        max_tokens = settings.max_model_len or self.usage.workload.max_tokens
        block_bytes = int(self._costs(weights).kv_bytes * BLOCK_SIZE)
        num_bytes = max_num_seqs * ceil(max_tokens / BLOCK_SIZE) * block_bytes
        return replace(settings, max_model_len=max_tokens, kv_cache_bytes=settings.kv_cache_bytes or num_bytes)

    def _streamed_batching(self, plan: ExpertPlan, default: Batching) -> Batching:
        """Return how many tokens a pass may have whose experts come from disk, of which any prompt needs nearly all."""
        if self.settings.max_num_batched_tokens is not None:
            return default
        left_bytes = self.free_bytes - plan.min_bytes - self.process_bytes
        for num_tokens in DISK_NUM_BATCHED_TOKENS:
            work = work_bytes(self.shape, num_tokens=num_tokens, num_sampled=default.max_num_seqs)
            if num_tokens > default.max_num_batched_tokens and work <= left_bytes // 8:
                why = f"{num_tokens}: a long prompt then reads its experts once"
                self.reasons.append(("max_num_batched_tokens", why))
                return replace(default, max_num_batched_tokens=num_tokens)
        return default

    @property
    def _overhead_bytes(self) -> int:
        return self.process_bytes + self.work_bytes

    def _memory_plan(self, weight_bytes: int) -> MemoryPlan | None:
        if self.settings.memory_bytes is None:
            return None
        return MemoryPlan(
            limit_bytes=self.settings.memory_bytes,
            process_bytes=self.process_bytes,
            weight_bytes=weight_bytes,
            work_bytes=self.work_bytes,
            is_served=self.settings.is_served,
        )

    def _expert_plan(self, weights: WeightChoice, dtype: str) -> ExpertPlan | None:
        """Return how experts come from disk; None if there are none, or all that is needed fits into memory."""
        if not self.shape.num_experts or self._left(weights) >= min_kv_bytes(self.settings, self.shape, dtype):
            return None
        return ExpertPlan.make(
            self.checkpoint,
            self.shape,
            weights,
            packed_weights_file=self.settings.packed_weights_file,
            cache_dir=self.settings.cache_dir,
            policy=self.settings.expert_policy,
            predictor=self.settings.predictor,
        )

    def _expert_slots(self, plan: ExpertPlan) -> ExpertSlotsConfig:
        """Return the slots there are while keys, values and work space need nothing."""
        config = plan.slots(self.free_bytes - plan.resident_bytes - self.process_bytes)
        self.reasons.append(("experts", plan.reason(config)))
        return config

    def _weights(self, device: str, *, can_pack: bool) -> WeightChoice:
        choice = explicit_choice(self.settings.dtype, self.settings.quantize, can_pack=can_pack)
        if choice is None:
            if can_pack:
                choice = own_precision(self.checkpoint, self._keeps_precision)
            else:
                is_cpu = device == "cpu" and not self.offloads_to_torch
                choice = for_torch(self.checkpoint, lambda it: self._left(it) >= self.free_bytes / 2, is_cpu=is_cpu)
            self.reasons.append(("weights", f"{choice.matrices}: {choice.reason}"))
        return choice.with_routers(self.checkpoint)

    def _keeps_precision(self, weights: WeightChoice) -> bool:
        """Return whether float32 may stay: with a memory limit, what does not fit comes from disk."""
        return self.settings.memory_bytes is not None or self._left(weights) >= 0

    def _left(self, weights: WeightChoice) -> float:
        """Return the bytes that weights and process leave; negative if they do not fit."""
        return self.free_bytes - self._weight_bytes(weights) - self._overhead_bytes

    def _packed_file(self, weights: WeightChoice) -> str:
        """Return the packed weights that all weights are mapped from; empty if there is none."""
        named = self.settings.packed_weights_file
        file = find_packed_weights_file(self.checkpoint, weights.formats, named, self.settings.cache_dir)
        if file is not None:
            self.reasons.append(("start", f"weights are mapped from {file}, as `moeflow pack` left them"))
        elif named is not None:
            self.reasons.append(("start", f"weights are packed anew: {named} is not there (`moeflow pack` makes it)"))
        return "" if file is None else str(file)

    def _check_weights(self, weights: WeightChoice, plan: ExpertPlan | None) -> int:
        """Return the bytes of the weights that must be in memory. Raises: CapacityError if they do not fit."""
        num_bytes = self._weight_bytes(weights) if plan is None else plan.min_bytes
        if num_bytes + self._overhead_bytes > self.free_bytes:
            if plan is not None:
                raise CapacityError(
                    f"{format_bytes(plan.resident_bytes)} of the weights must be in memory, and {plan.min_slots} "
                    f"experts at a time: with the process that is {format_bytes(num_bytes + self._overhead_bytes)} in "
                    f"{weights.matrices}, but {format_bytes(self.free_bytes)} are allowed: raise the memory limit "
                    f"(--memory), or use {instead_of(weights.matrices)}"
                )
            raise CapacityError(
                f"the weights need {format_bytes(num_bytes)} in {weights.matrices} and the process "
                f"{format_bytes(self._overhead_bytes)} more, but {format_bytes(self.free_bytes)} of memory are free: "
                f"use {instead_of(weights.matrices)}, or free memory{self._hint()}"
            )
        return num_bytes

    def _hint(self) -> str:
        can_stream = self.shape.num_experts and self.settings.memory_bytes is None and extension.is_available()
        return "; or set a limit (--memory) and have experts come from disk" if can_stream else ""


def _absolute(file: Path | None) -> str:
    return "" if file is None else str(file.absolute())


def _default_batching(settings: Settings, usage: Usage) -> Batching:
    """Return what holds where nothing is known of the machine's speed."""
    most = usage.num_sequences or usage.num_requests or DEFAULT_MAX_NUM_SEQS
    max_num_seqs = settings.max_num_seqs or min(most, DEFAULT_MAX_NUM_SEQS)
    num_tokens = settings.max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
    return Batching(max_num_seqs, num_tokens)
