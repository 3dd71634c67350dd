"""The choices for this machine, made in order, each with its reason. Only headers of the model are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import called
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig, SchedulerConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.hardware import RAM, Machine
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ExpertParallelConfig, ParallelConfig
from moeflow.experts.predict.registry import COMBINED, WHOLE_PASS
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import on_demand
from moeflow.models.expert_predictor.saved import predictor_bytes
from moeflow.planner.choices.batching_choice import Batching, choose_batching
from moeflow.planner.choices.encoder_choice import check_expert_capacity, with_whole_inputs
from moeflow.planner.choices.expert_plan import ExpertPlan
from moeflow.planner.choices.kv_cache_choice import (
    KVCacheChoice,
    choose_kv_cache,
    kv_share,
    min_kv_bytes,
    num_kept_blocks,
)
from moeflow.planner.choices.layer_table import stays_on_disk
from moeflow.planner.choices.lossy_routing import choose_lossy_routing, predictor_of, served_name
from moeflow.planner.choices.packed_files import find_packed_weights_file, place_of_packed_weights
from moeflow.planner.choices.processor_choice import Reasons, choose_cpu_isa, choose_device, choose_num_threads
from moeflow.planner.choices.prompt_cache_choice import buffer_bytes, choose_prompt_cache
from moeflow.planner.choices.rank_choice import RankMemory, explain_ranks, possible_ranks
from moeflow.planner.choices.rank_layout_choice import choose_rank_layouts
from moeflow.planner.choices.refused_settings import check_settings
from moeflow.planner.choices.replica_choice import (
    check_replicas,
    choose_expert_parallel,
    what_each_computes,
    what_each_has,
)
from moeflow.planner.choices.speculation_choice import SpeculatorChoice, choose_speculators
from moeflow.planner.choices.state_choice import choose_states
from moeflow.planner.choices.weight_choice import (
    WeightChoice,
    activations_reason,
    explicit_choice,
    for_torch,
    own_precision,
    shares_layers,
)
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.rank_costs import Sharing
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.costs.work_space import work_bytes
from moeflow.planner.estimate import host_costs
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.known_importance import known_importance_file
from moeflow.planner.known_routing import known_routing
from moeflow.planner.memory_budget import MemoryBudget
from moeflow.planner.search.objective import Objective
from moeflow.planner.settings import (
    BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DISK_NUM_BATCHED_TOKENS,
    Settings,
)
from moeflow.planner.usage import Usage

if TYPE_CHECKING:
    from moeflow.experts.remote import borrowing
    from moeflow.planner.choices import remote_choice
else:
    remote_choice = on_demand("moeflow.planner.choices.remote_choice")
    borrowing = on_demand("moeflow.experts.remote.borrowing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a machine's speed is asked for."""

    costs: ModelCosts
    packed_file: Path | None  # that experts come from, once it is written; None: all have room in memory
    has_ranks: bool = False


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
        self.num_replicas = settings.num_replicas or 1
        self.settings = settings
        if settings.kv_cache_bytes is not None:
            self.settings = replace(settings, kv_cache_bytes=settings.kv_cache_bytes // self.num_replicas)
        self.usage = usage
        self.offloads_to_torch = offloads_to_torch
        self.resources = resources
        self.shape = shape
        self.checkpoint = checkpoint
        self.machine_of = machine_of
        self.routing = routing
        self.machine: Machine | None = None  # once its speed is asked for, if that is known
        self.reasons: Reasons = []
        self.memory_bytes = 0  # of all replicas; 0: not known, as a device has its own
        self._is_table_on_disk = False  # of embeddings for each layer, once weights are chosen

    def config(self) -> EngineConfig:
        """Make all choices. Raises: ConfigError, CapacityError, CheckpointError."""
        settings, reasons = self.settings, self.reasons
        device = choose_device(settings.device, self.resources, reasons)
        is_offloaded = self.offloads_to_torch or device != "cpu"
        check_settings(settings, self.shape, is_offloaded=is_offloaded)
        check_expert_capacity(settings, self.shape)
        check_replicas(settings, device, offloads_to_torch=self.offloads_to_torch)
        budget = self.budget = MemoryBudget(settings, self.resources, self.shape, device, self._costs)
        budget.take_share()
        cpu_isa = "" if self.offloads_to_torch else choose_cpu_isa(settings.cpu_isa, device, reasons)
        speculators = self._speculators(device, cpu_isa)
        lossy_top_k = choose_lossy_routing(settings, self.checkpoint, self.shape, reasons)
        if lossy_top_k or settings.predictor in (WHOLE_PASS, COMBINED):
            budget.predictor_bytes = predictor_bytes(self.checkpoint.path, settings.packed_weights_file)
        budget.prompt_cache_bytes = buffer_bytes(settings, self.shape)
        batching = _default_batching(settings, self.usage)
        budget.set_beside_weights(cpu_isa, batching)
        weights = self._weights(device, can_pack=bool(cpu_isa))
        file = self._find_packed_file(weights) if cpu_isa else None
        self._is_table_on_disk = stays_on_disk(self._costs(weights), file, reasons)
        dtype = "float32" if cpu_isa else weights.matrices
        budget.parallel = self._ranks(weights, batching, cpu_isa)
        is_limited = bool(cpu_isa and settings.memory_bytes)
        maps_together = self._count_mapped_once(weights, cpu_isa)
        plan = self._expert_plan(weights, dtype, maps_together=maps_together) if is_limited else None
        batching = self._batching(batching, weights, plan, cpu_isa)
        batching = with_whole_inputs(batching, settings, self.shape, reasons)
        budget.set_beside_weights(cpu_isa, batching)
        weight_bytes = budget.check_weights(weights, plan)
        parallel = self._parallel(plan)
        expert_parallel = self._expert_parallel(cpu_isa, plan)
        speculators.check(parallel)
        held = RankMemory.of(self._costs(weights), parallel)
        share = kv_share(has_slots=plan is not None, takes_all=is_limited and not settings.shares_memory)
        attends_in_torch = device != "cpu" or self.offloads_to_torch or not extension.is_available()
        cache = choose_kv_cache(
            self._with_reserved_kv(weights, batching.max_num_seqs, held),
            held.kv_shape,
            torch_dtype=dtype if attends_in_torch else None,
            left_bytes=budget.left_for_kv(weight_bytes),
            share=share,
            max_num_seqs=batching.max_num_seqs,
            reasons=reasons,
        )
        if parallel is not None:
            held.explain(cache.num_bytes, reasons)
        if device == "cpu" and not self.offloads_to_torch:
            own_bytes = weight_bytes + budget.overhead_bytes + budget.num_here * cache.num_bytes
            self.memory_bytes = self.num_replicas * (own_bytes if plan is None else budget.free_bytes)
        return EngineConfig(
            model_path=str(self.checkpoint.path),
            model_name=served_name(settings.model_name or called(self.checkpoint.path), settings),
            dtype=dtype,
            weight_format=weights.matrices,
            embedding_format=weights.embeddings,
            head_format=weights.head or "",
            layer_table_format=weights.layer_table or "",
            layer_formats=weights.layers,
            mix=weights.mix or "",
            importance_file=self._importance_file(weights),
            router_format=weights.routers,
            is_own_precision=weights.is_own,
            is_wide=weights.is_exact,
            cpu_isa=cpu_isa,
            kv_dtype=cache.dtype,
            device=device,
            num_threads=self._threads_of_each(maps_together=maps_together and plan is None),
            prompt_cache=choose_prompt_cache(
                settings, self.shape, cpu_isa=cpu_isa, shares_layers=parallel is not None, reasons=reasons
            ),
            scheduler=self._scheduler(
                cache, batching, None if plan is None else num_kept_blocks(settings, cache, share)
            ),
            kv_cache_bytes=cache.num_bytes,
            experts=self._expert_slots(plan, cpu_isa, is_wide=weights.is_exact),
            expert_capacity=settings.expert_capacity or 0,
            lossy_top_k=lossy_top_k,
            packed_file=self._packed_file(weights) if cpu_isa and plan is None else "",
            parallel=parallel,
            expert_parallel=expert_parallel,
            speculators=speculators.names,
            draft_models=speculators.draft_models,
            device_memory_bytes=settings.device_memory_bytes or 0,
            memory=budget.memory_plan(weight_bytes if plan is None else plan.resident_bytes),
            record_routing=self._record_routing(),
            graph_file=_absolute(settings.graph_file),
            trace_file=_absolute(settings.trace_file),
        )

    def _speculators(self, device: str, cpu_isa: str) -> SpeculatorChoice:
        """Return what guesses, and count the memory that it takes."""
        chosen = choose_speculators(
            self.settings,
            self.checkpoint,
            self.shape,
            cpu_isa=cpu_isa,
            is_offloaded=self.offloads_to_torch or device != "cpu",
            reasons=self.reasons,
        )
        self.budget.draft_bytes = chosen.num_bytes
        return chosen

    def _scheduler(self, cache: KVCacheChoice, batching: Batching, num_kept: int | None) -> SchedulerConfig:
        return SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=cache.num_blocks,
            max_model_len=cache.max_model_len,
            max_num_seqs=batching.max_num_seqs,
            max_num_batched_tokens=batching.max_num_batched_tokens,
            prefix_caching=self.settings.prefix_caching
            and self.shape.encoder is None,  # else blocks depend on all of it
            num_kept_blocks=num_kept,
            states=choose_states(self.shape, self.budget.num_state_slots, self.reasons),
        )

    def _threads_of_each(self, *, maps_together: bool) -> int:
        """Return the threads of each process that computes."""
        number, num_here = self.num_replicas, self.budget.num_here
        num_threads = choose_num_threads(self.settings.num_threads, self.resources, self.reasons)
        num_threads = max(num_threads // (num_here * number), 1)
        if number > 1:
            of_each = (num_threads * num_here, self.budget.free_bytes)
            self.reasons.append(("replicas", what_each_has(number, *of_each, maps_together=maps_together)))
        return num_threads

    def _count_mapped_once(self, weights: WeightChoice, cpu_isa: str) -> bool:
        """Count the weights of several engines once if all map them from one file, and return whether they do."""
        if self.num_replicas == 1 or not cpu_isa:
            return False
        maps_together = self.settings.expert_parallel or self._find_packed_file(weights) is not None
        if maps_together:
            self.budget.take_share(mapped_bytes=ceil(self._costs(weights).model_bytes))
        return maps_together

    def _ranks(self, weights: WeightChoice, batching: Batching, cpu_isa: str) -> ParallelConfig | None:
        """Return how processes share the model, in the layouts that are fastest of those that the user leaves open;
        None: there is one process. Raises: ConfigError where they cannot.
        """
        candidates = possible_ranks(self.settings, self._costs(weights))
        if not candidates:
            return None
        if not cpu_isa or self.offloads_to_torch:
            raise ConfigError(
                "ranks (--ranks, --stages) compute with the CPU's kernels: leave --device away, or use one rank"
            )
        if candidates[0].stages is None:  # of stages there is no forecast
            self._ask_machine(weights, None, cpu_isa, has_ranks=True)
        fitting = [it for it in candidates if self.budget.left(weights, it) >= 0] or candidates[:1]
        if (machine := self.machine) is None:
            return fitting[0]
        costs, num_tokens = self._costs(weights), batching.max_num_batched_tokens
        return choose_rank_layouts(
            fitting,
            lambda parallel: self._cost_model_of(costs, machine, parallel)(num_tokens),
            1 if self.usage.goal == "latency" else batching.max_num_seqs,
            self.reasons,
        )

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
        if parallel.stages is not None and self.settings.record_routing is not None:
            raise ConfigError("no stage sees what all routers choose (--record-routing): leave --stages away for that")
        explain_ranks(parallel, self.shape, self.reasons)
        return parallel

    def _expert_parallel(self, cpu_isa: str, plan: ExpertPlan | None) -> ExpertParallelConfig | None:
        """Return how replicas share experts; None: they do not. Raises: ConfigError where they cannot."""
        shared = choose_expert_parallel(self.settings, self.shape)
        if shared is None:
            return None
        if not cpu_isa:
            raise ConfigError(
                "replicas that share experts (--expert-parallel) compute with the CPU's kernels, which are not there: "
                f"{extension.why_not()}"
            )
        if plan is not None:
            raise ConfigError(
                "replicas that share experts (--expert-parallel) keep them in memory, once for all, but --memory is "
                "too little: allow more, or have each compute apart"
            )
        self.reasons.append(("experts", what_each_computes(shared, self.shape.num_experts)))
        return shared

    def _record_routing(self) -> str:
        """Return the file for what routers choose. Raises: ConfigError if there are no routers."""
        if self.settings.record_routing is not None and not self.shape.num_experts:
            raise ConfigError("this is a dense model: it has no routing to record (--record-routing)")
        return _absolute(self.settings.record_routing)

    def _batching(self, default: Batching, weights: WeightChoice, plan: ExpertPlan | None, cpu_isa: str) -> Batching:
        """Return how many requests run together, in passes of how many tokens."""
        parallel = self.budget.parallel
        if self.machine is None and (parallel is None or parallel.stages is None):
            self._ask_machine(weights, plan, cpu_isa)
        if self.machine is None:
            return default if plan is None else self._streamed_batching(plan, default)
        try:
            chosen = choose_batching(
                self.usage,
                self._objective(weights, plan),
                self._cost_model_of(self._costs(weights), self.machine, parallel),
                max_num_seqs=self.settings.max_num_seqs,
                max_num_batched_tokens=self.settings.max_num_batched_tokens,
            )
        except CapacityError:
            if self.usage.reserves_kv:
                raise
            return default  # shorter requests than are planned for may have room
        self.reasons += chosen.reasons()
        return chosen

    def _ask_machine(
        self, weights: WeightChoice, plan: ExpertPlan | None, cpu_isa: str, *, has_ranks: bool = False
    ) -> None:
        """Learn how fast the machine is, and how its routers choose."""
        if not cpu_isa or cpu_isa != extension.isa_name():  # measured are the best kernels
            return
        file = None if plan is None else plan.packed_weights_file
        self.machine = self.machine_of(Wanted(costs=self._costs(weights), packed_file=file, has_ranks=has_ranks))
        if self.machine is not None:
            self.routing = self.routing or known_routing(self.checkpoint, self.settings.cache_dir)

    def _objective(self, weights: WeightChoice, plan: ExpertPlan | None) -> Objective:
        """Return what batches are chosen by, within the memory that weights, keys and values may take."""
        limit = self.budget.free_bytes
        if plan is None and not self.usage.reserves_kv:
            left = max(self.budget.left(weights), 0.0)
            takes_all = self.settings.memory_bytes is not None and not self.settings.shares_memory
            limit -= int(left * (1 - kv_share(has_slots=False, takes_all=takes_all)))
        return self.usage.objective({RAM: limit})

    def _costs(self, weights: WeightChoice) -> ModelCosts:
        kv_dtype = "float32" if self.settings.kv_dtype == "auto" else self.settings.kv_dtype
        formats = Formats(
            matrices=weights.matrices,
            embeddings=weights.embeddings,
            kv=kv_dtype,
            routers=weights.routers,
            head=weights.head,
            layer_table=weights.layer_table,
            is_table_on_disk=self._is_table_on_disk,
            layers=weights.layers,
            is_wide=weights.is_exact,
        )
        return ModelCosts(self.shape, formats)

    def _cost_model_of(
        self, costs: ModelCosts, machine: Machine, parallel: ParallelConfig | None
    ) -> Callable[[int], CostModel]:
        """Return the costs of passes of so many tokens."""

        def model(num_tokens: int) -> CostModel:
            return host_costs(
                costs,
                machine,
                self.usage.workload,
                routing=self.routing or EVEN_ROUTING,
                process_bytes=self.budget.process_bytes + work_bytes(self.shape, num_tokens=num_tokens, num_sampled=0),
                chunk_tokens=num_tokens,
                sharing=Sharing(parallel=parallel, num_replicas=self.num_replicas),
            )

        return model

    def _with_reserved_kv(self, weights: WeightChoice, max_num_seqs: int, held: RankMemory) -> Settings:
        """Return the settings, with a KV cache for just the workload if that is what it is for."""
        settings = self.settings
        if not self.usage.reserves_kv:
            return settings
        max_tokens = settings.max_model_len or self.usage.workload.max_tokens
        kv_bytes = replace(self._costs(weights), shape=held.kv_shape).kv_bytes
        block_bytes = int(kv_bytes * BLOCK_SIZE)
        num_bytes = max_num_seqs * ceil(max_tokens / BLOCK_SIZE) * block_bytes
        return replace(settings, max_model_len=max_tokens, kv_cache_bytes=settings.kv_cache_bytes or num_bytes)

    def _streamed_batching(self, plan: ExpertPlan, default: Batching) -> Batching:
        """Return how many tokens a pass may have whose experts come from disk, of which any prompt needs nearly all."""
        if self.settings.max_num_batched_tokens is not None:
            return default
        left_bytes = self.budget.free_bytes - plan.min_bytes - self.budget.process_bytes
        for num_tokens in DISK_NUM_BATCHED_TOKENS:
            work = work_bytes(self.shape, num_tokens=num_tokens, num_sampled=default.max_num_seqs)
            if num_tokens > default.max_num_batched_tokens and work <= left_bytes // 8:
                why = f"{num_tokens}: a long prompt then reads its experts once"
                self.reasons.append(("max_num_batched_tokens", why))
                return replace(default, max_num_batched_tokens=num_tokens)
        return default

    def _expert_plan(self, weights: WeightChoice, dtype: str, *, maps_together: bool) -> ExpertPlan | None:
        """Return how experts come from disk; None if there are none, or all that is needed fits into memory."""
        if not self.shape.num_experts or self.budget.left(weights) >= min_kv_bytes(self.settings, self.shape, dtype):
            return None
        if maps_together:  # after all, each engine has its own
            self.budget.take_share()
        return ExpertPlan.make(
            self.checkpoint,
            self.shape,
            weights,
            packed_weights_file=self.settings.packed_weights_file,
            cache_dir=self.settings.cache_dir,
            policy=self.settings.expert_policy,
            predictor=predictor_of(self.settings),
        )

    def _expert_slots(self, plan: ExpertPlan | None, cpu_isa: str, *, is_wide: bool) -> ExpertSlotsConfig | None:
        """Return the slots there are while keys, values and work space need nothing, and who has the other experts."""
        has_lenders = self.settings.remote_experts is not None
        if plan is None:
            if has_lenders:
                self.reasons.append(("remote_experts", "not used: all experts fit into memory here"))
            return None
        config = plan.slots(self.budget.free_bytes - plan.resident_bytes - self.budget.process_bytes)
        self.reasons.append(("experts", plan.reason(config)))
        if not has_lenders:
            return config
        borrowed = borrowing.borrowing_of(plan.spec, self.shape, cpu_isa=cpu_isa, is_wide=is_wide, num_wanted=0)
        return remote_choice.with_lenders(self.settings, config, borrowed, self.machine, self.reasons)

    def _weights(self, device: str, *, can_pack: bool) -> WeightChoice:
        can_differ = not shares_layers(self.settings) and self.shape.recurrent is None
        choice = explicit_choice(
            self.settings.dtype, self.settings.quantize, self.shape, can_pack=can_pack, can_differ=can_differ
        )
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
            else:
                is_cpu = device == "cpu" and not self.offloads_to_torch
                choice = for_torch(self.checkpoint, self._fits_well, is_cpu=is_cpu)
            self.reasons.append(("weights", f"{choice.matrices}: {choice.reason}"))
        return choice.with_routers(self.checkpoint)

    def _importance_file(self, weights: WeightChoice) -> str:
        """Return what is known of the importance of inputs, for rounding to a mix; empty if nothing is.

        Ranks on other machines may know something else, and all are to round alike.
        """
        if weights.mix is None or self.settings.listen_ranks or self.settings.ray_address:
            return ""
        file = known_importance_file(self.checkpoint, self.settings.cache_dir)
        known = "known from text" if file else "not known: `moeflow pack` learns it"
        self.reasons.append(("quantize", f"{weights.mix}: which inputs matter is {known}"))
        return "" if file is None else str(file)

    def _fits_well(self, weights: WeightChoice) -> bool:
        return self.budget.left(weights) >= self.budget.free_bytes / 2

    def _keeps_precision(self, weights: WeightChoice) -> bool:
        """Return whether float32 may stay: with a memory limit, what does not fit comes from disk."""
        return self.settings.memory_bytes is not None or self.budget.left(weights) >= 0

    def _packed_file(self, weights: WeightChoice) -> str:
        """Return the packed weights that all weights are mapped from; empty if there is none."""
        named, file = self.settings.packed_weights_file, self._find_packed_file(weights)
        if file is None and self.settings.expert_parallel:  # which replicas need: the first of them makes it
            file = place_of_packed_weights(self.checkpoint, weights.formats, named, self.settings.cache_dir)
            self.reasons.append(("start", f"weights are packed into {file} first, and mapped from there"))
        elif file is not None:
            self.reasons.append(("start", f"weights are mapped from {file}, as `moeflow pack` left them"))
        elif named is not None:
            self.reasons.append(("start", f"weights are packed anew: {named} is not there (`moeflow pack` makes it)"))
        return "" if file is None else str(file)

    def _find_packed_file(self, weights: WeightChoice) -> Path | None:
        settings = self.settings
        return find_packed_weights_file(
            self.checkpoint, weights.formats, settings.packed_weights_file, settings.cache_dir
        )


def _absolute(file: Path | None) -> str:
    return "" if file is None else str(file.absolute())


def _default_batching(settings: Settings, usage: Usage) -> Batching:
    """Return what holds where nothing is known of the machine's speed."""
    most = usage.num_sequences or usage.num_requests or DEFAULT_MAX_NUM_SEQS
    max_num_seqs = settings.max_num_seqs or min(most, DEFAULT_MAX_NUM_SEQS)
    num_tokens = settings.max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
    return Batching(max_num_seqs, num_tokens)
