"""Plans for a machine that is described in a file, and not this one: whether it has the model is not asked.

A machine with a device is planned for as MoE-Lightning does, weights in 16 bits unless the user sets another format;
others in the formats that the engine itself would choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import ceil
from pathlib import Path
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import called
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig, MemoryPlan
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.hardware import DEVICE, RAM, Machine
from moeflow.core.offload_config import CudaDeviceConfig, OffloadConfig
from moeflow.core.plan import RESIDENT, Plan, Policy
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.registry import read_bare_config, read_model_config
from moeflow.planner.choices.batching_choice import Batching, choose_num_batched_tokens
from moeflow.planner.choices.expert_plan import ExpertPlan
from moeflow.planner.choices.kv_cache_choice import KVCacheChoice, choose_kv_cache, kv_share
from moeflow.planner.choices.processor_choice import Reasons, choose_cpu_isa, choose_num_threads
from moeflow.planner.choices.rank_choice import RankMemory, explain_ranks, possible_ranks
from moeflow.planner.choices.rank_layout_choice import choose_rank_layouts
from moeflow.planner.choices.state_choice import choose_states, num_state_slots
from moeflow.planner.choices.weight_choice import WeightChoice, explicit_choice, own_precision, shares_layers
from moeflow.planner.configuration import Choices, Model, engine_config
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES, PROCESS_BYTES, CostModel, IntegerPolicy
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.process_memory import ENGINE_BYTES, margin_bytes, planned_bytes
from moeflow.planner.costs.rank_costs import Sharing
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.costs.work_space import work_bytes
from moeflow.planner.estimate import Estimator, host_costs, machine_reasons
from moeflow.planner.forecast import disk_reasons, expert_places, forecast
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.host_forecast import Wanted
from moeflow.planner.known_routing import known_routing
from moeflow.planner.model_files import bare_config, shipped_models
from moeflow.planner.resident_experts import min_slots, num_on_device, num_slots_of_share
from moeflow.planner.search.host_search import host_policy
from moeflow.planner.search.objective import Objective, capacities
from moeflow.planner.search.search import search
from moeflow.planner.settings import BLOCK_SIZE, DEFAULT_MAX_NUM_SEQS, Settings, to_plain
from moeflow.planner.usage import Usage

_GPU: Final = "cuda:0"


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the costs that it was found with."""

    plan: Plan
    model: CostModel
    objective: Objective
    estimator: Estimator | None = None  # of the plan's configuration; None: it does not compute on this processor


def plan_described(
    settings: Settings,
    usage: Usage,
    machine_of: Callable[[Wanted], Machine],
    *,
    has_device: bool,
    routing: RoutingProfile | None = None,
) -> Planned:
    """Return the best plan for the machine that `machine_of` returns.

    Raises: CapacityError if nothing fits; CheckpointError if there is no such model; ConfigError.
    """
    with _opened(settings) as checkpoint:
        return _Described(settings, usage, checkpoint, has_device=has_device, routing=routing).plan(machine_of)


@contextmanager
def _opened(settings: Settings) -> Iterator[Checkpoint | None]:
    """Yield the model; None: there is its shape alone. Raises: CheckpointError, which names other models."""
    assert settings.model is not None, "a model is named"
    if bare_config(settings.model) is not None:
        yield None
        return
    try:
        checkpoint = open_checkpoint(settings.model)
    except CheckpointError as error:
        path, remedy = Path(settings.model), error.remedy
        if (path / "config.json").is_file():
            remedy += f"; to plan for its shape alone, use `moeflow plan {path / 'config.json'} --machine NAME`"
        elif not path.exists():
            remedy += f"; shapes that can be planned for without weights are {', '.join(shipped_models())}"
        raise CheckpointError(error.problem, file=error.file, tensor=error.tensor, remedy=remedy) from None
    with closing(checkpoint):
        yield checkpoint


class _Described:
    """The choices for one model on a described machine."""

    def __init__(
        self,
        settings: Settings,
        usage: Usage,
        checkpoint: Checkpoint | None,
        *,
        has_device: bool,
        routing: RoutingProfile | None,
    ) -> None:
        self.settings, self.usage, self.checkpoint, self.has_device = settings, usage, checkpoint, has_device
        self.model_name = str(settings.model)
        if checkpoint is None:
            self.shape = read_bare_config(shipped_models().get(self.model_name) or Path(self.model_name))
            self.routing = routing or EVEN_ROUTING
        else:
            self.shape = read_model_config(checkpoint)
            self.routing = routing or known_routing(checkpoint, settings.cache_dir)
        usage.check(self.shape, self.model_name)
        self.choice = self._weights()
        self.reasons: Reasons = [("weights", f"{self.choice.name}: {self.choice.reason or 'as asked for'}")]

    def plan(self, machine_of: Callable[[Wanted], Machine]) -> Planned:
        """Return the best plan for the machine that `machine_of` returns."""
        settings, usage, has_device = self.settings, self.usage, self.has_device
        costs = ModelCosts(self.shape, _formats(self.choice, settings, has_device=has_device))
        machine = machine_of(Wanted(costs=costs, packed_file=None, has_ranks=(settings.num_ranks or 1) > 1))
        objective = usage.objective(_limits(settings, machine), has_device=has_device)
        if has_device:
            _check_one_engine(settings)
            model = CostModel(machine, costs, usage.workload, routing=self.routing, process_bytes=PROCESS_BYTES)
        else:
            host = _Host(settings, usage, machine, costs, self.routing, objective)
            model = _shared_host(host, self.reasons)
        model, policy = search(model, objective)
        reasons = (*_why(model, policy), *machine_reasons(machine))
        config = self._config(model, policy, objective)
        plan = Plan(
            config=config,
            settings=to_plain(self._settings(config, machine)),
            num_replicas=model.sharing.num_replicas,
            memory_bytes=model.sharing.num_replicas * self._held_bytes(model, policy, config),
            goal=usage.goal,
            workload=usage.workload,
            machine=machine.name,
            machine_identity=machine.identity,
            forecast=forecast(model, policy, objective.memory_limits),
            reasons=(*self.reasons, *reasons),
        )
        return Planned(plan, model, objective)

    def _weights(self) -> WeightChoice:
        """Return the formats of the weights."""
        settings, checkpoint = self.settings, self.checkpoint
        can_differ = not shares_layers(settings)
        asked = explicit_choice(settings.dtype, settings.quantize, self.shape, can_pack=True, can_differ=can_differ)
        if checkpoint is None:
            chosen = asked or WeightChoice("bfloat16", "bfloat16", "as such models are published")
            routers: WeightFormat = "bfloat16" if chosen.matrices == "bfloat16" else "float32"
            return dataclasses.replace(chosen, routers=routers)
        chosen = asked or own_precision(
            checkpoint, lambda _: True, can_differ=can_differ, is_exact=settings.exact_activations
        )
        if asked is None and self.has_device and chosen.matrices == "float32":
            chosen = WeightChoice("bfloat16", "bfloat16", "devices compute in 16 bits")
        return chosen.with_routers(checkpoint)

    def _config(self, model: CostModel, policy: Policy, objective: Objective) -> EngineConfig:
        """Return the engine's configuration that carries a policy out."""
        settings, costs, is_host = self.settings, model.costs, not self.has_device
        room_bytes = capacities(model, objective.memory_limits)[RAM]
        cache, offload = self._cache(model, policy, room_bytes), None
        if not is_host and pipeline_of(model, policy) != RESIDENT:
            offload = _offload(model, policy, cache.num_blocks)
        has_slots = is_host and policy.experts_on_disk > 0
        is_limited = settings.memory_bytes is not None or has_slots
        num_tokens = max(policy.chunk_tokens, policy.batch_size)
        states = (
            num_state_slots(self.shape, policy.batch_size, room_bytes, shares_prefixes=settings.prefix_caching)
            if is_host
            else 0
        )
        choices = Choices(
            device="cpu" if is_host or offload is not None else _GPU,
            cpu_isa=choose_cpu_isa(settings.cpu_isa, "cpu", self.reasons) if is_host and self.checkpoint else "",
            dtype="float32" if is_host else "bfloat16",
            weights=self.choice,
            num_threads=self._num_threads(model.sharing),
            batching=Batching(policy.batch_size, num_tokens),
            cache=cache,
            shares_prefixes=settings.prefix_caching and is_host,
            states=choose_states(self.shape, states, self.reasons) if is_host else None,
            experts=self._slots(costs, policy) if has_slots else None,
            parallel=model.sharing.parallel,
            offload=offload,
            device_memory_bytes=0 if is_host else model.machine.level(DEVICE).capacity_bytes,
            memory=self._memory(model, policy, room_bytes) if is_limited else None,
        )
        path, name = _path(settings), called(Path(self.model_name))
        about = Model(path=path, name=name, shape=self.shape, checkpoint=self.checkpoint, settings=settings)
        return engine_config(about, choices, self.reasons)

    def _num_threads(self, sharing: Sharing) -> int:
        """Return the threads of each process, on the machine that makes the plan; 0: there is nothing to run."""
        if self.checkpoint is None:
            return self.settings.num_threads or 0
        num_threads = choose_num_threads(self.settings.num_threads, host_resources(), [])
        return max(num_threads // (sharing.num_here * sharing.num_replicas), 1)

    def _cache(self, model: CostModel, policy: Policy, room_bytes: int) -> KVCacheChoice:
        """Return a cache for the workload; on a host, for longer requests, too, as far as memory goes."""
        dtype, max_tokens = model.costs.formats.kv, model.workload.max_tokens
        num_blocks = policy.batch_size * ceil(max_tokens / BLOCK_SIZE)
        shape = RankMemory.of(model.costs, model.sharing.parallel).kv_shape
        cache = KVCacheChoice(dtype, num_blocks, shape.kv_bytes_per_token(dtype) * BLOCK_SIZE, max_tokens)
        if self.has_device:
            return cache
        held_bytes = model.memory(IntegerPolicy(policy.batch_size, 1, False))[RAM].const
        if policy.experts_on_disk:
            held_bytes -= (1 - model.min_experts) * model.costs.experts_bytes
        spare_bytes = max(room_bytes - held_bytes, 0) / model.sharing.num_here
        return choose_kv_cache(
            dataclasses.replace(self.settings, kv_dtype=dtype),
            shape,
            torch_dtype=None,
            left_bytes=int(spare_bytes) + cache.num_bytes,
            share=kv_share(has_slots=policy.experts_on_disk > 0, takes_all=self.settings.memory_bytes is not None),
            max_num_seqs=policy.batch_size,
            least_blocks=num_blocks,
            reasons=self.reasons,
        )

    def _held_bytes(self, model: CostModel, policy: Policy, config: EngineConfig) -> int:
        """Return what one engine holds of main memory at most."""
        if config.memory is not None and not self.has_device:
            return config.memory.limit_bytes
        planned_blocks = policy.batch_size * ceil(model.workload.max_tokens / BLOCK_SIZE)
        more_kv = 1 - planned_blocks / config.scheduler.num_blocks
        held_bytes = model.predict(policy).memory[RAM]
        return ceil(held_bytes + model.sharing.num_here * config.kv_cache_bytes * more_kv)

    def _slots(self, costs: ModelCosts, policy: Policy) -> ExpertSlotsConfig:
        num_experts = costs.num_moe_layers * self.shape.num_experts
        least = min_slots(self.shape.top_k, num_experts)
        num_slots = num_slots_of_share(policy.experts_on_disk, num_experts, least=least)
        if self.checkpoint is None:
            return ExpertSlotsConfig(
                packed_weights_file="", num_slots=num_slots, slab_bytes=ceil(costs.expert_bytes), min_slots=least
            )
        return ExpertPlan.make(self.checkpoint, self.shape, self.choice, self.settings).config(num_slots)

    def _memory(self, model: CostModel, policy: Policy, room_bytes: int) -> MemoryPlan:
        num_work_bytes = 0 if self.has_device else work_bytes(self.shape, num_tokens=policy.chunk_tokens, num_sampled=0)
        return MemoryPlan(
            limit_bytes=room_bytes,
            process_bytes=model.process_bytes - num_work_bytes,
            weight_bytes=ceil(model.costs.model_bytes - policy.experts_on_disk * model.costs.experts_bytes),
            work_bytes=num_work_bytes,
            is_served=self.settings.is_served,
        )

    def _settings(self, config: EngineConfig, machine: Machine) -> Settings:
        """Return settings that name the machine's memory, and what stays on its device."""
        settings, offload = self.settings, config.offload
        if not self.has_device:
            limit = machine.level(RAM).capacity_bytes if config.experts is not None else None
            return dataclasses.replace(settings, memory_bytes=settings.memory_bytes or limit)
        if offload is None:
            return dataclasses.replace(settings, device=config.device)
        assert offload.cuda is not None, "described devices are GPUs"
        return dataclasses.replace(
            settings,
            device=f"{offload.cuda.name}:{offload.cuda.memory_bytes}",
            device_memory_bytes=None,
            pipeline=offload.pipeline,
            micro_batch=offload.micro_batch_tokens,
            resident_experts=offload.num_resident_experts / max(self.shape.num_experts, 1),
        )


def _formats(choice: WeightChoice, settings: Settings, *, has_device: bool) -> Formats:
    kv_dtype = settings.kv_dtype if settings.kv_dtype != "auto" else "bfloat16" if has_device else "float32"
    return Formats(
        matrices=choice.matrices,
        embeddings=choice.embeddings,
        kv=kv_dtype,
        activation_bytes=2 if has_device else 4,
        routers=choice.routers,
        head=choice.head,
        layer_table=choice.layer_table,
        layers=choice.layers,
        is_wide=choice.is_exact,
    )


def _limits(settings: Settings, machine: Machine) -> dict[str, int]:
    """Return the bytes that an engine may take: of several, its part."""
    number, limit = settings.num_replicas or 1, settings.memory_bytes
    if number > 1:
        limit = (limit or machine.level(RAM).capacity_bytes) // number
    return {} if limit is None else {RAM: limit}


def _check_one_engine(settings: Settings) -> None:
    """Raises: ConfigError if several processes are to share a device."""
    for flag, number in (("--ranks", settings.num_ranks), ("--replicas", settings.num_replicas)):
        if (number or 1) > 1:
            raise ConfigError(f"{flag} {number} is for processes that compute on the processor: leave it away")


@dataclasses.dataclass(frozen=True, slots=True)
class _Host:
    """A model on a machine without a device."""

    settings: Settings
    usage: Usage
    machine: Machine
    costs: ModelCosts
    routing: RoutingProfile
    objective: Objective

    def model(self, sharing: Sharing) -> CostModel:
        """Return the costs, in passes of as many tokens as is best."""
        settings, costs = self.settings, self.costs
        margin = 0 if settings.memory_bytes is None else margin_bytes(is_served=settings.is_served)
        held = planned_bytes(ENGINE_BYTES, costs.shape, is_served=settings.is_served) + margin

        def model(num_tokens: int) -> CostModel:
            work = work_bytes(costs.shape, num_tokens=num_tokens, num_sampled=0)
            return host_costs(
                costs,
                self.machine,
                self.usage.workload,
                routing=self.routing,
                process_bytes=held + work,
                chunk_tokens=num_tokens,
                sharing=sharing,
            )

        return model(settings.max_num_batched_tokens or choose_num_batched_tokens(self.usage, self.objective, model)[0])


def _shared_host(host: _Host, reasons: Reasons) -> CostModel:
    """Return the costs of one of the engines that share a host, with the layouts that are fastest of those that fit."""
    number, shape = host.settings.num_replicas or 1, host.costs.shape
    candidates = possible_ranks(host.settings, host.costs)
    if not candidates:
        return host.model(Sharing(num_replicas=number))
    models = {it: host.model(Sharing(parallel=it, num_replicas=number)) for it in candidates}
    fitting = [it for it, model in models.items() if host_policy(model, host.objective, 1) is not None]
    most = 1 if host.usage.goal == "latency" else host.usage.num_sequences or DEFAULT_MAX_NUM_SEQS
    parallel = choose_rank_layouts(fitting or candidates[:1], models.__getitem__, most, reasons)
    explain_ranks(parallel, shape, reasons)
    return models[parallel]


def _path(settings: Settings) -> str:
    """Return what a plan calls the model: a shipped shape's name, or where it is."""
    return str(settings.model) if settings.model in shipped_models() else str(Path(str(settings.model)).absolute())


def _offload(model: CostModel, policy: Policy, num_blocks: int) -> OffloadConfig:
    shape, memory_bytes = model.costs.shape, model.machine.level(DEVICE).capacity_bytes
    kv_layers = round(policy.kv_on_device * shape.num_layers) if policy.attention_on_device else 0
    window = policy.micro_batch * ceil(model.workload.max_tokens / BLOCK_SIZE)
    has_windows = policy.attention_on_device and kv_layers < shape.num_layers
    resident = dict(expert_places(model, policy)).get(DEVICE, 0.0)
    return OffloadConfig(
        cuda=CudaDeviceConfig(
            name=_GPU, memory_bytes=memory_bytes, capacity_bytes=max(memory_bytes - DEVICE_RESERVE_BYTES, 0)
        ),
        pipeline=pipeline_of(model, policy),
        micro_batch_tokens=policy.micro_batch,
        num_resident_experts=num_on_device(resident, shape.num_experts),
        num_resident_kv_layers=kv_layers,
        window_blocks=min(window, num_blocks) if has_windows else 0,
        num_hosted_experts=0,
    )


def pipeline_of(model: CostModel, policy: Policy) -> str:
    """Return the name of the pipeline that carries out a device's policy (MoE-Lightning 4.1)."""
    assert model.has_device
    if not policy.attention_on_device:
        return "cgopipe"
    if policy.kv_on_device < 1:
        return "flexgen"  # S4: keys and values are fetched for each micro-batch
    return RESIDENT if policy.weights_on_device == 1 else "zero-inference"


def _why(model: CostModel, policy: Policy) -> list[tuple[str, str]]:
    """Return the reasons for a policy: (field, why)."""
    reasons = disk_reasons(model, policy)
    if not model.has_device:
        return reasons
    attends = "faster there" if policy.attention_on_device else "faster than fetching keys and values"
    return [
        ("attention_on_device", attends),
        ("weights_on_device", "what the device has room for beside the batch"),
        ("num_devices", f"{policy.num_devices} of {model.machine.num_devices}"),
        *reasons,
    ]
