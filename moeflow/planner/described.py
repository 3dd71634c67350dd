"""Plans for a machine that is described in a file, and not this one: whether it has the model is not asked.

Plans for a machine with a device follow MoE-Lightning: weights in 16 bits unless the user sets another format. Other
plans use the formats that the engine would choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import ceil
from pathlib import Path
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import BLOCK_SIZE, ExpertSlotsConfig, MemoryPlan
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.hardware import DEVICE, RAM, Machine
from moeflow.core.offload_config import CudaDeviceConfig, OffloadConfig
from moeflow.core.plan import RESIDENT, Plan, Policy
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.packing import slab_spec
from moeflow.models.registry import read_bare_config, read_model_config
from moeflow.planner.choices.batching_choice import DEFAULT_MAX_NUM_SEQS, Batching, choose_num_batched_tokens
from moeflow.planner.choices.expert_plan import ExpertPlan
from moeflow.planner.choices.kv_cache_choice import KVCacheChoice, choose_kv_cache, kv_share
from moeflow.planner.choices.processor_choice import Reasons, choose_cpu_isa, choose_num_threads
from moeflow.planner.choices.rank_choice import RankMemory, explain_ranks, possible_ranks
from moeflow.planner.choices.rank_layout_choice import choose_rank_layouts
from moeflow.planner.choices.state_choice import choose_states, num_state_slots
from moeflow.planner.choices.weight_choice import WeightChoice, explicit_choice, own_precision, shares_layers
from moeflow.planner.configuration import Choices, engine_config
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES, PROCESS_BYTES, CostModel, IntegerPolicy
from moeflow.planner.costs.model_costs import ModelCosts
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
from moeflow.planner.search.objective import Objective
from moeflow.planner.search.search import search
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings, to_plain

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
        return _Described(settings, usage, checkpoint, machine_of, has_device=has_device, routing=routing).plan()


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
        machine_of: Callable[[Wanted], Machine],
        *,
        has_device: bool,
        routing: RoutingProfile | None,
    ) -> None:
        """`checkpoint` None: there is the model's shape alone."""
        self.settings, self.usage, self.checkpoint, self.has_device = settings, usage, checkpoint, has_device
        if checkpoint is None:
            name = str(settings.model)
            self.shape = read_bare_config(shipped_models().get(name) or Path(name))
        else:
            self.shape = read_model_config(checkpoint)
        usage.check(self.shape, str(settings.model))
        known = EVEN_ROUTING if checkpoint is None else known_routing(checkpoint, settings.cache_dir)
        self.routing = routing or known
        self.weights = self._weights()
        kv_dtype = "bfloat16" if has_device else "float32"
        kv_dtype = kv_dtype if settings.kv_dtype == "auto" else settings.kv_dtype
        self.costs = ModelCosts(self.shape, self.weights.costed(kv_dtype, activation_bytes=2 if has_device else 4))
        self.machine = machine_of(Wanted(costs=self.costs, packed_file=None, has_ranks=(settings.num_ranks or 1) > 1))
        number, limit = settings.num_replicas or 1, settings.memory_bytes
        if number > 1:  # each has its part
            limit = (limit or self.machine.level(RAM).capacity_bytes) // number
        self.objective = usage.objective({} if limit is None else {RAM: limit}, has_device=has_device)
        self.room_bytes = limit or self.machine.level(RAM).capacity_bytes
        self.reasons: Reasons = [("weights", f"{self.weights.name}: {self.weights.reason or 'as asked for'}")]

    def plan(self) -> Planned:
        """Return the best plan. Raises: CapacityError if nothing fits."""
        usage, machine, limits = self.usage, self.machine, self.objective.memory_limits
        model, policy = search(self._on_device() if self.has_device else self._shared_host(), self.objective)
        why = (*_why(model, policy), *machine_reasons(machine))
        num_replicas, choices = model.sharing.num_replicas, self._choices(model, policy)
        plan = Plan(
            config=engine_config(
                self.settings, self.shape, self.checkpoint, choices, self.reasons, model_path=_path(self.settings)
            ),
            settings=to_plain(self._settings(choices)),
            num_replicas=num_replicas,
            memory_bytes=num_replicas * self._held_bytes(model, policy, choices),
            goal=usage.goal,
            workload=usage.workload,
            machine=machine.name,
            machine_identity=machine.identity,
            forecast=forecast(model, policy, limits),
            reasons=(*self.reasons, *why),
        )
        return Planned(plan, model, self.objective)

    def _held_bytes(self, model: CostModel, policy: Policy, choices: Choices) -> int:
        """Return what one engine holds of main memory: for the workload, or as much as a limit allows."""
        if choices.memory is not None and not self.has_device:
            return choices.memory.limit_bytes
        return ceil(model.predict(policy).memory[RAM])

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

    def _on_device(self) -> CostModel:
        """Return the costs with a device. Raises: ConfigError if several processes are to share it."""
        for flag, number in (("--ranks", self.settings.num_ranks), ("--replicas", self.settings.num_replicas)):
            if (number or 1) > 1:
                raise ConfigError(f"{flag} {number} is for processes on the processor: remove the option")
        workload = self.usage.workload
        return CostModel(self.machine, self.costs, workload, routing=self.routing, process_bytes=PROCESS_BYTES)

    def _shared_host(self) -> CostModel:
        """Return the costs of one of the engines that share a host, in the fastest layouts that fit."""
        number, objective = self.settings.num_replicas or 1, self.objective
        candidates = possible_ranks(self.settings, self.costs)
        if not candidates:
            return self._on_host(Sharing(num_replicas=number))
        models = {it: self._on_host(Sharing(parallel=it, num_replicas=number)) for it in candidates}
        fitting = [it for it, model in models.items() if host_policy(model, objective, 1) is not None]
        most = 1 if self.usage.goal == "latency" else self.usage.num_sequences or DEFAULT_MAX_NUM_SEQS
        parallel = choose_rank_layouts(fitting or candidates[:1], models.__getitem__, most, self.reasons)
        explain_ranks(parallel, self.shape, self.reasons)
        return models[parallel]

    def _on_host(self, sharing: Sharing) -> CostModel:
        """Return the costs, in passes of as many tokens as is best."""
        settings, shape = self.settings, self.shape
        margin = 0 if settings.memory_bytes is None else margin_bytes(is_served=settings.is_served)
        held = planned_bytes(ENGINE_BYTES, shape, is_served=settings.is_served) + margin

        def model(num_tokens: int) -> CostModel:
            return host_costs(
                self.costs,
                self.machine,
                self.usage.workload,
                routing=self.routing,
                process_bytes=held + work_bytes(shape, num_tokens=num_tokens, num_sampled=0),
                chunk_tokens=num_tokens,
                sharing=sharing,
            )

        return model(settings.max_num_batched_tokens or choose_num_batched_tokens(self.usage, self.objective, model)[0])

    def _choices(self, model: CostModel, policy: Policy) -> Choices:
        """Return the decisions that carry a policy out."""
        batching = Batching(policy.batch_size, max(policy.chunk_tokens, policy.batch_size))
        return (
            self._device_choices(model, policy, batching)
            if self.has_device
            else self._host_choices(model, policy, batching)
        )

    def _device_choices(self, model: CostModel, policy: Policy, batching: Batching) -> Choices:
        """Requests are as long as the workload's at most: what stays where is made for these."""
        max_tokens = model.workload.max_tokens
        num_blocks = policy.batch_size * ceil(max_tokens / BLOCK_SIZE)
        offload = None if pipeline_of(model, policy) == RESIDENT else _offload(model, policy, num_blocks)
        return Choices(
            device=_GPU if offload is None else "cpu",
            cpu_isa="",
            dtype="bfloat16",
            weights=self.weights,
            num_threads=self._num_threads(1),
            batching=batching,
            cache=KVCacheChoice(self.costs.formats.kv, num_blocks, ceil(BLOCK_SIZE * self.costs.kv_bytes), max_tokens),
            shares_prefixes=False,
            offload=offload,
            device_memory_bytes=self.machine.level(DEVICE).capacity_bytes,
            memory=self._memory(model, policy, 0) if self.settings.memory_bytes is not None else None,
        )

    def _host_choices(self, model: CostModel, policy: Policy, batching: Batching) -> Choices:
        """Requests may be longer than the workload's, as far as memory goes."""
        settings, sharing, has_slots = self.settings, model.sharing, policy.experts_on_disk > 0
        slots = num_state_slots(self.shape, policy.batch_size, self.room_bytes, shares_prefixes=settings.prefix_caching)
        is_limited = settings.memory_bytes is not None or has_slots
        work = work_bytes(self.shape, num_tokens=policy.chunk_tokens, num_sampled=0)
        return Choices(
            device="cpu",
            cpu_isa="" if self.checkpoint is None else choose_cpu_isa(settings.cpu_isa, "cpu", self.reasons),
            dtype="float32",
            weights=self.weights,
            num_threads=self._num_threads(sharing.num_here * sharing.num_replicas),
            batching=batching,
            cache=self._host_cache(model, policy),
            shares_prefixes=settings.prefix_caching,
            states=choose_states(self.shape, slots, self.reasons),
            experts=self._slots(policy) if has_slots else None,
            parallel=sharing.parallel,
            memory=self._memory(model, policy, work) if is_limited else None,
        )

    def _num_threads(self, num_processes: int) -> int:
        """Return the threads of each process, on the machine that makes the plan; 0: there is nothing to run."""
        if self.checkpoint is None:
            return self.settings.num_threads or 0
        return max(choose_num_threads(self.settings.num_threads, host_resources(), []) // num_processes, 1)

    def _host_cache(self, model: CostModel, policy: Policy) -> KVCacheChoice:
        dtype, has_slots = self.costs.formats.kv, policy.experts_on_disk > 0
        shape = RankMemory.of(self.costs, model.sharing.parallel).kv_shape
        num_blocks = policy.batch_size * ceil(model.workload.max_tokens / BLOCK_SIZE)
        held_bytes = model.memory(IntegerPolicy(policy.batch_size, 1, False))[RAM].const
        if has_slots:
            held_bytes -= (1 - model.min_experts) * self.costs.experts_bytes
        spare_bytes = max(self.room_bytes - held_bytes, 0) / model.sharing.num_here
        return choose_kv_cache(
            dataclasses.replace(self.settings, kv_dtype=dtype),
            shape,
            torch_dtype=None,
            left_bytes=int(spare_bytes) + num_blocks * shape.kv_bytes_per_token(dtype) * BLOCK_SIZE,
            share=kv_share(has_slots=has_slots, takes_all=self.settings.memory_bytes is not None),
            max_num_seqs=policy.batch_size,
            least_blocks=num_blocks,
            reasons=self.reasons,
        )

    def _slots(self, policy: Policy) -> ExpertSlotsConfig:
        num_experts = self.costs.num_moe_layers * self.shape.routing.num_experts
        least = min_slots(self.shape.routing.top_k, num_experts)
        num_slots = num_slots_of_share(policy.experts_on_disk, num_experts, least=least)
        if self.checkpoint is None:
            size = ceil(self.costs.expert_bytes)
            return ExpertSlotsConfig(packed_weights_file="", num_slots=num_slots, slab_bytes=size, min_slots=least)
        spec = slab_spec(self.checkpoint, self.weights.formats)
        return ExpertPlan.make(self.checkpoint, self.shape, spec, self.settings).config(num_slots)

    def _memory(self, model: CostModel, policy: Policy, num_work_bytes: int) -> MemoryPlan:
        return MemoryPlan(
            limit_bytes=self.room_bytes,
            process_bytes=model.process_bytes - num_work_bytes,
            weight_bytes=ceil(self.costs.model_bytes - policy.experts_on_disk * self.costs.experts_bytes),
            work_bytes=num_work_bytes,
            is_served=self.settings.is_served,
        )

    def _settings(self, choices: Choices) -> Settings:
        """Return settings that name the machine's memory, and the share of experts on its device."""
        settings, offload = self.settings, choices.offload
        if not self.has_device:
            limit = None if choices.experts is None else self.machine.level(RAM).capacity_bytes
            return dataclasses.replace(settings, memory_bytes=settings.memory_bytes or limit)
        if offload is None:
            return dataclasses.replace(settings, device=choices.device)
        assert offload.cuda is not None, "described devices are GPUs"
        return dataclasses.replace(
            settings,
            device=f"{offload.cuda.name}:{offload.cuda.memory_bytes}",
            device_memory_bytes=None,
            pipeline=offload.pipeline,
            micro_batch=offload.micro_batch_tokens,
            resident_experts=offload.num_resident_experts / max(self.shape.routing.num_experts, 1),
        )


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
        num_resident_experts=num_on_device(resident, shape.routing.num_experts),
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
