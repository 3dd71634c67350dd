"""Plans for a machine that is described in a file, and not this one: whether it has the model is not asked.

A machine with a device is planned for as MoE-Lightning does, weights in 16 bits unless the user sets another format;
others in the formats that the engine itself would choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from functools import partial
from math import ceil
from pathlib import Path
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import called
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig, MemoryPlan, SchedulerConfig
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.hardware import DEVICE, RAM, Machine
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import CudaDeviceConfig, OffloadConfig
from moeflow.core.plan import RESIDENT, Plan, Policy
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.registry import read_bare_config, read_model_config
from moeflow.planner.choices.batching_choice import choose_num_batched_tokens
from moeflow.planner.choices.expert_plan import min_slots
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.rank_choice import explain_ranks, possible_ranks
from moeflow.planner.choices.rank_layout_choice import choose_rank_layouts
from moeflow.planner.choices.weight_choice import WeightChoice, explicit_choice, own_precision, shares_layers
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES, PROCESS_BYTES, CostModel
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.process_memory import ENGINE_BYTES, margin_bytes, planned_bytes
from moeflow.planner.costs.rank_costs import Sharing
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.costs.work_space import work_bytes
from moeflow.planner.estimate import host_costs, machine_reasons
from moeflow.planner.forecast import disk_reasons, expert_places, forecast
from moeflow.planner.host_forecast import Wanted
from moeflow.planner.known_routing import known_routing
from moeflow.planner.model_files import bare_config, shipped_models
from moeflow.planner.search.host_search import host_policy
from moeflow.planner.search.objective import Objective
from moeflow.planner.search.search import search
from moeflow.planner.settings import BLOCK_SIZE, DEFAULT_MAX_NUM_SEQS, Settings
from moeflow.planner.usage import Usage

_GPU: Final = "cuda:0"


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the costs that it was found with."""

    plan: Plan
    model: CostModel
    objective: Objective


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
    shape, choice, learnt = _look_at(settings, has_device=has_device)
    usage.check(shape, str(settings.model))
    costs = ModelCosts(shape, _formats(choice, settings, has_device=has_device))
    machine = machine_of(Wanted(costs=costs, packed_file=None, has_ranks=(settings.num_ranks or 1) > 1))
    learnt = routing or learnt
    reasons: Reasons = []
    objective = usage.objective(_limits(settings, machine), has_device=has_device)
    if has_device:
        _check_one_engine(settings)
        model = CostModel(machine, costs, usage.workload, routing=learnt, process_bytes=PROCESS_BYTES)
    else:
        model = _shared_host(_Host(settings, usage, machine, costs, learnt, objective), reasons)
    model, policy = search(model, objective)
    plan = Plan(
        config=_config(settings, choice, model, policy),
        num_replicas=model.sharing.num_replicas,
        goal=usage.goal,
        workload=usage.workload,
        machine=machine.name,
        machine_identity=machine.identity,
        forecast=forecast(model, policy, objective.memory_limits),
        reasons=(
            ("weights", f"{choice.name}: {choice.reason or 'as asked for'}"),
            *reasons,
            *_why(model, policy),
            *machine_reasons(machine),
        ),
    )
    return Planned(plan, model, objective)


def _look_at(settings: Settings, *, has_device: bool) -> tuple[ModelConfig, WeightChoice, RoutingProfile]:
    """Return a model's shape, the formats to use, and what was learnt of its routers."""
    assert settings.model is not None, "a model is named"
    can_differ = not shares_layers(settings)
    asked_for = partial(explicit_choice, settings.dtype, settings.quantize, can_pack=True, can_differ=can_differ)
    if (bare := bare_config(settings.model)) is not None:
        own, shape = WeightChoice("bfloat16", "bfloat16", "as such models are published"), read_bare_config(bare)
        chosen = asked_for(shape) or own
        routers: WeightFormat = "bfloat16" if chosen.matrices == "bfloat16" else "float32"
        return shape, dataclasses.replace(chosen, routers=routers), EVEN_ROUTING
    with closing(_opened(settings.model)) as checkpoint:
        shape = read_model_config(checkpoint)
        asked = asked_for(shape)
        chosen = asked or own_precision(
            checkpoint, lambda _: True, can_differ=can_differ, is_exact=settings.exact_activations
        )
        if asked is None and has_device and chosen.matrices == "float32":
            chosen = WeightChoice("bfloat16", "bfloat16", "devices compute in 16 bits")
        routing = known_routing(checkpoint, settings.cache_dir)
        return shape, chosen.with_routers(checkpoint), routing


def _opened(model: str) -> Checkpoint:
    """Return a checkpoint. Raises: CheckpointError, which names what else can be planned for."""
    try:
        return open_checkpoint(model)
    except CheckpointError as error:
        path, remedy = Path(model), error.remedy
        if (path / "config.json").is_file():
            remedy += f"; to plan for its shape alone, use `moeflow plan {path / 'config.json'} --machine NAME`"
        elif not path.exists():
            remedy += f"; shapes that can be planned for without weights are {', '.join(shipped_models())}"
        raise CheckpointError(error.problem, file=error.file, tensor=error.tensor, remedy=remedy) from None


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


def _config(settings: Settings, choice: WeightChoice, model: CostModel, policy: Policy) -> EngineConfig:
    """Return the engine's configuration that carries a policy out."""
    costs, workload, has_device = model.costs, model.workload, model.has_device
    num_blocks = policy.batch_size * ceil(workload.max_tokens / BLOCK_SIZE)
    offload = _offload(model, policy, num_blocks) if has_device and pipeline_of(model, policy) != RESIDENT else None
    memory_bytes = settings.memory_bytes
    if memory_bytes is None and policy.experts_on_disk and not has_device:
        memory_bytes = model.machine.level(RAM).capacity_bytes
    return EngineConfig(
        model_path=_path(settings),
        model_name=settings.model_name or called(Path(str(settings.model))),
        dtype="bfloat16" if has_device else "float32",
        weight_format=choice.matrices,
        embedding_format=choice.embeddings,
        head_format=choice.head or "",
        layer_table_format=choice.layer_table or "",
        layer_formats=choice.layers,
        mix=choice.mix or "",
        router_format=choice.routers,
        is_own_precision=choice.is_own,
        is_wide=choice.is_exact,
        cpu_isa="",
        kv_dtype=costs.formats.kv,
        device=_GPU if has_device and offload is None else "cpu",
        num_threads=settings.num_threads or 0,
        scheduler=SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=workload.max_tokens,
            max_num_seqs=policy.batch_size,
            max_num_batched_tokens=max(policy.chunk_tokens, policy.batch_size),
            prefix_caching=settings.prefix_caching and not has_device,
        ),
        kv_cache_bytes=ceil(num_blocks * BLOCK_SIZE * costs.kv_bytes),
        parallel=model.sharing.parallel,
        experts=_slots(costs, policy) if policy.experts_on_disk and not has_device else None,
        offload=offload,
        device_memory_bytes=model.machine.level(DEVICE).capacity_bytes if has_device else 0,
        memory=None
        if memory_bytes is None
        else MemoryPlan(
            limit_bytes=memory_bytes,
            process_bytes=model.process_bytes,
            weight_bytes=ceil(costs.model_bytes - policy.experts_on_disk * costs.experts_bytes),
            work_bytes=0,
            is_served=settings.is_served,
        ),
    )


def _path(settings: Settings) -> str:
    """Return what a plan calls the model: a shipped shape's name, or where it is."""
    return str(settings.model) if settings.model in shipped_models() else str(Path(str(settings.model)).absolute())


def _slots(costs: ModelCosts, policy: Policy) -> ExpertSlotsConfig:
    num_experts = costs.num_moe_layers * costs.shape.num_experts
    least = min(min_slots(costs.shape), num_experts)
    return ExpertSlotsConfig(
        packed_weights_file="",
        num_slots=max(int((1 - policy.experts_on_disk) * num_experts), least),
        slab_bytes=ceil(costs.expert_bytes),
        min_slots=least,
    )


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
        num_resident_experts=int(resident * shape.num_experts),
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
