"""The choices for this machine, made in order, each with its reason. Only headers of the model are read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.packed.layout import SlabSpec
from moeflow.core.engine_config import BLOCK_SIZE, EngineConfig, ExpertSlotsConfig, MemoryPlan
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.hybrid_config import HybridConfig
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.experts.predict.registry import COMBINED, WHOLE_PASS
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.triton.planar_rows import MADE_FORMATS
from moeflow.models.expert_predictor.saved import predictor_bytes
from moeflow.models.packing import slab_spec
from moeflow.planner.choices.batching_choice import MIN_TOGETHER, Batching
from moeflow.planner.choices.encoder_choice import with_whole_inputs
from moeflow.planner.choices.expert_plan import ExpertPlan, spec_of_shape
from moeflow.planner.choices.gpu_limits import check_number, check_on_cpu, check_on_gpu
from moeflow.planner.choices.kv_cache_choice import (
    MIN_KV_TOKENS,
    KVCacheChoice,
    choose_kv_cache,
    kv_share,
    min_kv_bytes,
    num_kept_blocks,
)
from moeflow.planner.choices.layer_table import stays_on_disk
from moeflow.planner.choices.lossy_routing import choose_lossy_routing
from moeflow.planner.choices.packed_files import find_packed_experts
from moeflow.planner.choices.processor_choice import ANY_ISA, Reasons, choose_cpu_isa, choose_device, choose_num_threads
from moeflow.planner.choices.prompt_cache_choice import buffer_bytes
from moeflow.planner.choices.rank_choice import RankMemory, explain_ranks, possible_ranks
from moeflow.planner.choices.rank_layout_choice import choose_rank_layouts
from moeflow.planner.choices.refused_settings import check_settings
from moeflow.planner.choices.replica_choice import (
    check_replicas,
    what_each_has,
)
from moeflow.planner.choices.speculation_choice import SpeculatorChoice, choose_speculators
from moeflow.planner.choices.start_choice import choose_packed_file, found_packed_file
from moeflow.planner.choices.state_choice import choose_states
from moeflow.planner.choices.weight_choice import (
    WeightChoice,
    activations_reason,
    explicit_choice,
    for_torch,
    of_shape,
    own_precision,
    shares_layers,
)
from moeflow.planner.configuration import Choices, engine_config
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.host_forecast import HostForecast, MachineOf, Wanted, default_batching
from moeflow.planner.known_routing import known_loads, known_popularity
from moeflow.planner.memory_budget import MemoryBudget
from moeflow.planner.model_files import path_in_plan
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings

with on_demand(__name__):
    from moeflow.experts.remote import borrowing
    from moeflow.planner.choices import (
        capacity_choice,
        device_ranks,
        device_weights,
        gpu_batching,
        gpu_main_memory,
        hybrid_choice,
        rank_schedule_choice,
        remote_choice,
    )
    from moeflow.planner.costs import hybrid_costs, hybrid_sizes


class _Held(msgspec.Struct, frozen=True, kw_only=True):
    """Weights as they are held, what computes with them, and in passes of what size."""

    device: str
    cpu_isa: str  # empty: torch computes
    weights: WeightChoice
    spec: SlabSpec | None  # packed; None: torch computes
    packed_file: Path | None  # that is there and holds them
    dtype: str
    plan: ExpertPlan | None  # None: all weights are in memory
    maps_together: bool  # replicas, from one file
    batching: Batching
    weight_bytes: int  # that must be in memory
    shared: hybrid_choice.SharedExperts | None  # with the CPU; None: the device computes all
    memory: MemoryPlan | None  # of a device's host; None: the host computes, or nothing limits it


class Decision:
    """The choices, made in order, each with its reason."""

    def __init__(
        self,
        settings: Settings,
        usage: Usage,
        resources: HostResources,
        checkpoint: Checkpoint | None,
        shape: ModelConfig,
        machine_of: MachineOf,
        *,
        routing: RoutingProfile | None = None,
        offloads_to_torch: bool = False,
    ) -> None:
        """`checkpoint` None: the model has no weights here, and its shape alone is planned for.

        `offloads_to_torch`: this is for the host of a device that computes in torch.
        """
        self.num_replicas = settings.num_replicas_here
        self.settings = settings
        if settings.kv_cache_bytes is not None:
            self.settings = replace(settings, kv_cache_bytes=settings.kv_cache_bytes // self.num_replicas)
        self.usage = usage
        self.offloads_to_torch = offloads_to_torch
        self.is_hybrid = False  # whether the CPU computes experts that the device has no memory for
        self.resources = resources
        self.shape = shape
        self.checkpoint = checkpoint
        self.machine_of = machine_of
        self.routing = routing
        self.reasons: Reasons = []
        self.memory_bytes = 0  # main memory of all replicas; 0: not known
        self._is_table_on_disk = False  # of embeddings for each layer, once weights are chosen
        self._activation_bytes = 4  # likewise
        self._is_on_gpu = False

    def config(self) -> EngineConfig:
        """Make all choices. Raises: ConfigError, CapacityError, CheckpointError."""
        device = choose_device(self.settings.device, self.resources)
        self._is_on_gpu = device != "cpu"
        self._check_settings(device)
        if self.settings.capacity_factor is not None:
            self.settings = capacity_choice.with_capacity(self.settings, self.shape, device, self.reasons)
        settings = self.settings
        self.budget = MemoryBudget(settings, self.resources, self.shape, device, self._costs)
        self.budget.take_share()
        self.host = HostForecast(
            settings, self.usage, self.checkpoint, self.machine_of, self.routing, self.budget, self._costs
        )
        cpu_isa = "" if self.offloads_to_torch else choose_cpu_isa(settings.cpu_isa, device, self.reasons)
        if self.checkpoint is None:  # nothing runs here
            cpu_isa = cpu_isa or ANY_ISA
        speculators = self._speculators(device, cpu_isa)
        lossy_top_k = self._lossy_top_k()
        held = self._held(device, cpu_isa)
        parallel = self._parallel(held.plan)
        speculators.check(parallel)
        cache, num_kept_blocks = self._kv_cache(held, parallel)
        if device == "cpu" and not self.offloads_to_torch:
            self.memory_bytes = self._held_bytes(held, cache)
        elif held.memory is not None:
            self.memory_bytes = held.memory.process_bytes + held.memory.weight_bytes
        return self._engine_config(held, parallel, cache, num_kept_blocks, lossy_top_k, speculators)

    def _held_bytes(self, held: _Held, cache: KVCacheChoice) -> int:
        """Return what all replicas hold at most; weights that they map from one file count once."""
        if held.plan is not None:
            return self.budget.total_bytes
        own_bytes = self.budget.overhead_bytes + self.budget.num_here * cache.num_bytes
        num_copies = 1 if held.maps_together else self.num_replicas
        return self.num_replicas * own_bytes + num_copies * held.weight_bytes

    def _check_settings(self, device: str) -> None:
        """Raises: ConfigError for what such models, or such devices, are not run with."""
        if self.offloads_to_torch or device != "cpu":
            check_on_gpu(self.settings, self.shape)
            check_number(self.settings, len(self.resources.accelerators_free_bytes))
        else:
            check_on_cpu(self.settings, "no GPU is asked for")
        check_settings(self.settings, self.shape)
        if self.settings.record_routing is not None and not self.shape.routing.num_experts:
            raise ConfigError("this is a dense model: it has no routing to record (--record-routing)")
        check_replicas(self.settings)

    def _lossy_top_k(self) -> int:
        """Return how many experts of a token a network chooses, and count the memory that it takes."""
        settings = self.settings
        if self.checkpoint is None:
            return 0
        top_k = choose_lossy_routing(settings, self.checkpoint, self.shape, self.reasons)
        if top_k or settings.predictor in (WHOLE_PASS, COMBINED):
            self.budget.predictor_bytes = predictor_bytes(self.checkpoint.path, settings.packed_weights_file)
        return top_k

    def _held(self, device: str, cpu_isa: str) -> _Held:
        """Return how weights are held and shared, and what passes beside them are like."""
        settings, budget = self.settings, self.budget
        budget.prompt_cache_bytes = buffer_bytes(settings, self.shape)
        batching = default_batching(settings, self.usage)
        budget.set_beside_weights(cpu_isa, batching)
        weights = self._weights(device, can_pack=bool(cpu_isa))
        if device != "cpu" and weights.embeddings != "float32":
            self._activation_bytes = 2
        spec = self._spec(weights) if cpu_isa else None
        file = None
        if spec is not None and self.checkpoint is not None:
            file = found_packed_file(settings, self.checkpoint, spec)
        self._is_table_on_disk = stays_on_disk(self._costs(weights), file, self.reasons)
        dtype = "float32" if cpu_isa else weights.embeddings
        budget.parallel = self._ranks(weights, batching, cpu_isa)
        maps_together = self._count_mapped_once(weights, file, cpu_isa)
        plan = None
        if spec is not None and settings.memory_bytes:
            plan = self._expert_plan(weights, spec, dtype, maps_together=maps_together)
        if self.is_hybrid:
            batching = self._hybrid_batching(batching, weights, device)
        elif device != "cpu":
            batching = self._gpu_batching(batching, weights, device)
        else:
            batching = self._batching(batching, weights, plan, cpu_isa)
        budget.set_beside_weights(cpu_isa, batching)
        memory = self._memory_beside_gpu(device, weights, batching)
        num_slots = None if memory is None else memory.num_slots
        shared = self._shared_experts(weights, batching, num_slots) if self.is_hybrid else None
        if shared is None:
            budget.count_passes_on_gpu(weights, batching, self.reasons)
        return _Held(
            device=device,
            cpu_isa=cpu_isa,
            weights=weights,
            spec=spec,
            packed_file=file,
            dtype=dtype,
            plan=plan,
            maps_together=maps_together,
            batching=batching,
            weight_bytes=budget.check_weights(weights, plan) if shared is None else 0,
            shared=shared,
            memory=None if memory is None else memory.plan,
        )

    def _hybrid_sizes(self, weights: WeightChoice) -> hybrid_sizes.HybridSizes:
        return hybrid_sizes.HybridSizes(self._costs(weights), hybrid_choice.host_format(weights, self.checkpoint))

    def _plan_on_disk(self, weights: WeightChoice, num_slots: int | None) -> ExpertPlan | None:
        """Return how experts come from disk beside a device; None: main memory has all."""
        if num_slots is None:
            return None
        sizes = self._hybrid_sizes(weights)
        return hybrid_choice.plan_on_disk(self.checkpoint, self.shape, weights, sizes, self.settings)

    def _shared_experts(
        self, weights: WeightChoice, batching: Batching, num_slots: int | None
    ) -> hybrid_choice.SharedExperts:
        """Return what the device and the CPU share."""
        isa = choose_cpu_isa(self.settings.cpu_isa, "cpu", self.reasons)
        own = hybrid_choice.host_format(weights, self.checkpoint)
        packed = None
        if self.checkpoint is not None and num_slots is None:
            packed = find_packed_experts(self.checkpoint, weights.formats.on_host(own), self.settings.cache_dir)
        return hybrid_choice.SharedExperts(
            sizes=self._hybrid_sizes(weights),
            packed_experts_file="" if packed is None else str(packed),
            on_disk=self._plan_on_disk(weights, num_slots),
            num_host_slots=num_slots,
            cpu_isa=isa or ANY_ISA,
            passes=hybrid_sizes.Passes(batching.max_num_batched_tokens, batching.max_num_seqs),
            popularity=known_popularity(self.checkpoint, self.settings.cache_dir),
            capacity_bytes=self.budget.free_bytes - self.budget.beside_process,
        )

    def _memory_beside_gpu(
        self, device: str, weights: WeightChoice, batching: Batching
    ) -> gpu_main_memory.MainMemory | None:
        """Return the use of main memory beside a GPU; None: it is not limited, or the CPU computes."""
        if device == "cpu" or (not self.is_hybrid and self.settings.memory_bytes is None):
            return None
        sizes = self._hybrid_sizes(weights) if self.is_hybrid else None
        passes = hybrid_sizes.Passes(batching.max_num_batched_tokens, batching.max_num_seqs)
        return gpu_main_memory.planned_memory(self.settings, self.resources, self.shape, sizes, passes)

    def _hybrid_batching(self, default: Batching, weights: WeightChoice, device: str) -> Batching:
        """Return the batching for a device that shares experts with the CPU."""
        memory = self._memory_beside_gpu(device, weights, default)
        num_slots = None if memory is None else memory.num_slots
        on_disk = self._plan_on_disk(weights, num_slots)
        self.host.ask_with_device(self._hybrid_sizes(weights).on_host, on_disk, device)
        limits = {DEVICE: self.budget.free_bytes - self.budget.beside_process, RAM: self.resources.available_bytes}
        costs = self._hybrid_costs(weights, num_slots)
        sizes = self._hybrid_sizes(weights)
        chosen = hybrid_choice.hybrid_batching(default, self.settings, self.usage, sizes, costs, limits)
        self.reasons += chosen.reasons()
        return chosen

    def _gpu_batching(self, default: Batching, weights: WeightChoice, device: str) -> Batching:
        """Return the batching for a device that holds the model."""
        settings, costs, left_bytes = self.settings, self._costs(weights), self.budget.left(weights)
        if left_bytes <= 0 or None not in (settings.max_num_seqs, settings.max_num_batched_tokens):
            return default
        machine = self.machine_of(Wanted(costs=costs, packed_file=None, device=device))
        speed = None
        if machine is not None and machine.has(DEVICE):
            speed = gpu_batching.ResidentSpeed(CostModel(machine, costs, self.usage.workload))
        spare = gpu_batching.SpareMemory.of(left_bytes, costs, settings, self.usage.workload)
        chosen = gpu_batching.gpu_batching(default, settings, self.usage, spare, speed)
        self.reasons += chosen.reasons()
        return chosen

    def _hybrid_costs(self, weights: WeightChoice, num_host_slots: int | None) -> hybrid_costs.HybridCosts | None:
        """Return the costs of sharing experts; None: the machine's speed is unknown."""
        if self.host.machine is None:
            return None
        return hybrid_costs.HybridCosts(
            self.host.machine,
            self._costs(weights),
            self.usage.workload,
            routing=self.host.routing or EVEN_ROUTING,
            host_format=hybrid_choice.host_format(weights, self.checkpoint),
            num_host_slots=num_host_slots,
        )

    def _batching(self, default: Batching, weights: WeightChoice, plan: ExpertPlan | None, cpu_isa: str) -> Batching:
        """Return the best batching for the usage, or the default if the best would displace weights."""
        reasons: Reasons = []
        chosen = self.host.batching(default, weights, plan, cpu_isa, reasons)
        chosen = with_whole_inputs(chosen, self.settings, self.shape, reasons)
        is_limited = cpu_isa and self.settings.memory_bytes is not None
        if is_limited and not self._fits_beside(chosen, weights, plan, cpu_isa):
            reasons = []
            chosen = with_whole_inputs(default, self.settings, self.shape, reasons)
        self.reasons += reasons
        return chosen

    def _fits_beside(self, batching: Batching, weights: WeightChoice, plan: ExpertPlan | None, cpu_isa: str) -> bool:
        """Return whether weights and the least keys and values fit beside passes."""
        self.budget.set_beside_weights(cpu_isa, batching)
        if plan is not None:
            return plan.min_bytes + self.budget.overhead_bytes <= self.budget.free_bytes
        return self.budget.left(weights) >= min_kv_bytes(self.settings, self.shape, "float32")

    def _kv_cache(self, held: _Held, parallel: ParallelConfig | None) -> tuple[KVCacheChoice, int | None]:
        """Return the cache of keys and values, and how many of its blocks stay in memory unused; None: all do."""
        settings, max_num_seqs = self.settings, held.batching.max_num_seqs
        of_ranks = RankMemory.of(self._costs(held.weights), parallel)
        is_limited = bool(held.cpu_isa and settings.memory_bytes)
        share = kv_share(has_slots=held.plan is not None, takes_all=is_limited and not settings.shares_memory)
        attends_in_torch = held.device != "cpu" or self.offloads_to_torch or not extension.is_available()
        cache = choose_kv_cache(
            settings,
            of_ranks.kv_shape,
            torch_dtype=self._attention_dtype(held) if attends_in_torch else None,
            left_bytes=self._bytes_for_kv(held),
            share=share,
            max_num_seqs=max_num_seqs,
            least_blocks=self._least_blocks(held),
            reasons=self.reasons,
        )
        if parallel is not None:
            of_ranks.explain(cache.num_bytes, self.reasons)
        return cache, None if held.plan is None else num_kept_blocks(settings, cache, share)

    def _bytes_for_kv(self, held: _Held) -> int:
        """Return what keys and values may take."""
        if held.shared is not None:
            return held.shared.bytes_for_kv(held.weights, held.device)
        return self.budget.left_for_kv(held.weight_bytes)

    def _least_blocks(self, held: _Held) -> int:
        """Return the KV blocks that must fit; a usual request comes before experts on a GPU."""
        reserved = self.usage.blocks_to_reserve(held.batching.max_num_seqs)
        if held.shared is None or self.settings.kv_cache_bytes is not None:
            return reserved
        usual = ceil(min(self.settings.max_model_len or self.shape.max_position, MIN_KV_TOKENS) / BLOCK_SIZE)
        if self.usage.is_interactive:
            return max(reserved, usual)
        return max(reserved, usual, held.batching.max_num_seqs * ceil(self.usage.workload.max_tokens / BLOCK_SIZE))

    def _hybrid(self, held: _Held, cache: KVCacheChoice) -> HybridConfig | None:
        """Return how the device and the CPU share experts; None: the device computes all."""
        shared = held.shared
        if shared is None:
            return None
        costs = self._hybrid_costs(held.weights, shared.num_host_slots)
        number = 1 if self.usage.is_interactive else held.batching.max_num_seqs
        return shared.config(cache.num_bytes, costs, max_num_seqs=number, reasons=self.reasons)

    def _attention_dtype(self, held: _Held) -> str:
        """Return the type of keys and values in torch; where the host attends, its kernels must know it."""
        return "bfloat16" if self.offloads_to_torch and held.dtype == "float16" else held.dtype

    def _engine_config(
        self,
        held: _Held,
        parallel: ParallelConfig | None,
        cache: KVCacheChoice,
        num_kept_blocks: int | None,
        lossy_top_k: int,
        speculators: SpeculatorChoice,
    ) -> EngineConfig:
        settings, checkpoint, plan = self.settings, self.checkpoint, held.plan
        choices = Choices(
            device=held.device,
            cpu_isa=held.cpu_isa,
            dtype=held.dtype,
            weights=held.weights,
            num_threads=self._threads_of_each(maps_together=held.maps_together and plan is None),
            batching=held.batching,
            cache=cache,
            num_kept_blocks=num_kept_blocks,
            shares_prefixes=self._shares_prefixes(parallel),
            states=choose_states(self.shape, self.budget.num_state_slots, self.reasons),
            experts=self._expert_slots(held),
            packed_file=self._packed_file(held),
            parallel=parallel,
            hybrid=self._hybrid(held, cache),
            gpu_memory_bytes=settings.gpu_memory_bytes or 0,
            memory=self._memory(held),
            lossy_top_k=lossy_top_k,
            speculators=speculators,
        )
        path = path_in_plan(str(settings.model)) if checkpoint is None else str(checkpoint.path)
        return engine_config(settings, self.shape, checkpoint, choices, self.reasons, model_path=path)

    def _shares_prefixes(self, parallel: ParallelConfig | None) -> bool:
        """Return whether sequences share blocks: not of an encoder, whose blocks depend on all of a text."""
        shares = self.settings.prefix_caching and self.shape.encoder is None
        if shares and parallel is not None and parallel.has_own_sequences:
            self.reasons.append(("prefix caching", "off: each rank has keys and values of its own sequences only"))
            return False
        return shares

    def _memory(self, held: _Held) -> MemoryPlan | None:
        """Return what a limit is divided into; None: there is none."""
        if held.device != "cpu":
            return None if self.settings.memory_bytes is None else held.memory
        return self.budget.memory_plan(held.weight_bytes if held.plan is None else held.plan.resident_bytes)

    def _speculators(self, device: str, cpu_isa: str) -> SpeculatorChoice:
        """Return the speculators, and count their memory."""
        if self.checkpoint is None:
            return SpeculatorChoice()
        chosen = choose_speculators(
            self.settings,
            self.checkpoint,
            self.shape,
            cpu_isa=cpu_isa,
            is_offloaded=self.offloads_to_torch,
            on_gpu=device != "cpu",
            reasons=self.reasons,
        )
        self.budget.draft_bytes = chosen.num_bytes
        return chosen

    def _threads_of_each(self, *, maps_together: bool) -> int:
        """Return the threads of each process that computes."""
        number, num_here = self.num_replicas, self.budget.num_here
        num_threads = choose_num_threads(self.settings.num_threads, self.resources, self.reasons)
        num_threads = max(num_threads // (num_here * number), 1)
        if number > 1:
            of_each = (num_threads * num_here, self.budget.free_bytes)
            self.reasons.append(("replicas", what_each_has(number, *of_each, maps_together=maps_together)))
        return num_threads

    def _count_mapped_once(self, weights: WeightChoice, file: Path | None, cpu_isa: str) -> bool:
        """Count the weights of several engines once if all map them from one file, and return whether they do."""
        if self.num_replicas == 1 or not cpu_isa:
            return False
        if file is not None:
            self.budget.take_share(mapped_bytes=ceil(self._costs(weights).model_bytes))
        return file is not None

    def _ranks(self, weights: WeightChoice, batching: Batching, cpu_isa: str) -> ParallelConfig | None:
        """Return how processes share the model, in the fastest layouts that the user leaves open;
        None: there is one process. Raises: ConfigError where they cannot.
        """
        candidates = possible_ranks(self.settings, self._costs(weights))
        if not candidates:
            return None
        if self.settings.device != "cpu":
            return device_ranks.fitting(candidates, lambda it: self.budget.left(weights, it) >= 0)
        if not cpu_isa:
            raise ConfigError(
                f"ranks (--ranks, --stages) compute with the CPU's kernels: {extension.why_not()}. Use one rank"
            )
        if candidates[0].stages is None:  # of stages there is no forecast
            self.host.ask(weights, None, cpu_isa, has_ranks=True)
        fitting = [it for it in candidates if self.budget.left(weights, it) >= 0] or candidates[:1]
        if (machine := self.host.machine) is None:
            return rank_schedule_choice.with_schedule(fitting[0], self.settings, self.shape, None, self.reasons)
        num_tokens = batching.max_num_batched_tokens

        def costs(parallel: ParallelConfig) -> CostModel:
            return self.host.cost_model_of(weights, machine, parallel)(num_tokens)

        number = 1 if self.usage.goal == "latency" else batching.max_num_seqs
        chosen = choose_rank_layouts(fitting, costs, number, self.reasons)
        return rank_schedule_choice.with_schedule(chosen, self.settings, self.shape, costs(chosen), self.reasons)

    def _parallel(self, plan: ExpertPlan | None) -> ParallelConfig | None:
        """Return how processes share the model, once it is known that all of it fits. Raises: ConfigError if not."""
        parallel = self.budget.parallel
        if parallel is None:
            return None
        if plan is not None:
            raise ConfigError(
                "ranks (--ranks, --stages) keep their experts in memory, but --memory is too little: allow more, or "
                "use one rank"
            )
        if self.settings.record_routing is not None and parallel.stages is not None:
            raise ConfigError("no stage sees what all routers choose (--record-routing): remove --stages for that")
        if self.settings.record_routing is not None and parallel.has_own_sequences:
            raise ConfigError(
                "each rank sees the routers' choices of its own sequences only (--record-routing): "
                "remove --attention-layout data for that"
            )
        if parallel.places_by_load:
            loads = known_loads(self.checkpoint, self.settings.cache_dir, self.shape)
            parallel = replace(parallel, expert_loads=loads)
        explain_ranks(parallel, self.shape, self.reasons, on_devices=self.settings.device != "cpu")
        return parallel

    def _spec(self, weights: WeightChoice) -> SlabSpec:
        """Return the sizes of the weights once packed."""
        if self.checkpoint is None:
            return spec_of_shape(self._costs(weights), weights)
        return slab_spec(self.checkpoint, weights.formats)

    def _packed_file(self, held: _Held) -> str:
        if held.spec is None or held.plan is not None or self.checkpoint is None:
            return ""
        return choose_packed_file(self.settings, self.checkpoint, held.spec, held.packed_file, self.reasons)

    def _costs(self, weights: WeightChoice) -> ModelCosts:
        kv_dtype = weights.embeddings if self._is_on_gpu else "float32"
        formats = weights.costed(
            kv_dtype if self.settings.kv_dtype == "auto" else self.settings.kv_dtype,
            activation_bytes=self._activation_bytes,
            is_table_on_disk=self._is_table_on_disk,
        )
        return ModelCosts(self.shape, formats)

    def _expert_plan(
        self, weights: WeightChoice, spec: SlabSpec, dtype: str, *, maps_together: bool
    ) -> ExpertPlan | None:
        """Return how experts come from disk; None if there are none, or all that is needed fits into memory.

        Where people wait, that includes as many requests as run with experts from disk.
        """
        need_bytes = min_kv_bytes(self.settings, self.shape, dtype)
        if self.usage.is_interactive and self.settings.kv_cache_bytes is None:
            most = self.settings.max_num_seqs or self.usage.max_sequences(has_device=False)
            need_bytes = max(need_bytes, min(most, MIN_TOGETHER) * self.host.kv_bytes_of_request(weights))
        if not self.shape.routing.num_experts or self.budget.left(weights) >= need_bytes:
            return None
        if maps_together:  # after all, each engine has its own
            self.budget.take_share()
        return ExpertPlan.make(self.checkpoint, self.shape, spec, self.settings)

    def _expert_slots(self, held: _Held) -> ExpertSlotsConfig | None:
        """Return the slots available before keys, values and work space, and the owner of the other experts."""
        plan, shared = held.plan, held.shared
        if shared is not None and shared.on_disk is not None and shared.num_host_slots is not None:
            config = shared.on_disk.config(shared.num_host_slots)
            self.reasons.append(("experts", shared.on_disk.reason(config)))
            return config
        has_lenders = self.settings.remote_experts is not None
        if plan is None:
            if has_lenders:
                self.reasons.append(("remote_experts", "not used: all experts fit into memory here"))
            return None
        config = plan.slots(self.budget.free_bytes - plan.resident_bytes - self.budget.process_bytes)
        self.reasons.append(("experts", plan.reason(config)))
        if not has_lenders:
            return config
        borrowed = borrowing.borrowing_of(
            plan.spec, self.shape, cpu_isa=held.cpu_isa, is_wide=held.weights.is_exact, num_wanted=0
        )
        return remote_choice.with_lenders(self.settings, config, borrowed, self.host.machine, self.reasons)

    def _weights(self, device: str, *, can_pack: bool) -> WeightChoice:
        on_gpu = device != "cpu" and not self.offloads_to_torch
        if self.settings.quantize in MADE_FORMATS and on_gpu and self.checkpoint is not None:
            found = device_weights.quantized_on_device(self.settings, has_bfloat16=self.resources.has_bfloat16)
            return found.with_routers(self.checkpoint)
        can_differ = not shares_layers(self.settings) and self.shape.recurrent is None
        choice = explicit_choice(
            self.settings.dtype, self.settings.quantize, self.shape, can_pack=can_pack, can_differ=can_differ
        )
        if self.checkpoint is None:
            choice = of_shape(choice)
            self.reasons.append(("weights", f"{choice.name}: {choice.reason or 'as asked for'}"))
            return choice
        if choice is None:
            if can_pack:
                choice = own_precision(
                    self.checkpoint,
                    self._keeps_precision,
                    can_differ=can_differ,
                    is_exact=self.settings.exact_activations,
                )
                if choice.has_integers:
                    self.reasons.append(("activations", activations_reason(is_exact=choice.is_exact)))
            elif device == "cpu" and not self.offloads_to_torch:
                choice = for_torch(self.checkpoint, self._fits_well)
            else:
                of_device = device_weights.own_on_device if on_gpu else device_weights.for_device
                if self.is_hybrid:
                    of_device = partial(hybrid_choice.shared_weights, self.shape)
                choice = of_device(self.checkpoint, has_bfloat16=self.resources.has_bfloat16)
            self.reasons.append(("weights", f"{choice.matrices}: {choice.reason}"))
        return choice.with_routers(self.checkpoint)

    def _fits_well(self, weights: WeightChoice) -> bool:
        return self.budget.left(weights) >= self.budget.free_bytes / 2

    def _keeps_precision(self, weights: WeightChoice) -> bool:
        """Return whether float32 may stay: within a limit, experts come from disk; a named file keeps its formats."""
        settings = self.settings
        is_decided = settings.memory_bytes is not None or settings.packed_weights_file is not None
        return is_decided or self.budget.left(weights) >= 0
