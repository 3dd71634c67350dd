"""Plans for a machine with a device, of this machine or of one in a file. Whether it has the model is not asked.

Plans use the formats that the engine would choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.engine_config import BLOCK_SIZE, ExpertSlotsConfig, MemoryPlan
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.hardware import DEVICE, RAM, Machine
from moeflow.core.hybrid_config import HybridConfig
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import CudaDeviceConfig, OffloadConfig, parse_cuda_device
from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.plan import HYBRID, RESIDENT, Plan, Policy
from moeflow.core.units import format_bytes
from moeflow.planner.choices.batching_choice import Batching
from moeflow.planner.choices.device_ranks import possible_device_ranks, why_not_divided
from moeflow.planner.choices.device_weights import for_device, in_half, own_on_device, quantized_on_device
from moeflow.planner.choices.gpu_limits import check_number, check_on_gpu
from moeflow.planner.choices.hybrid_choice import (
    are_shared,
    can_be_hybrid,
    host_format,
    hybrid_config,
    plan_on_disk,
)
from moeflow.planner.choices.kv_cache_choice import KVCacheChoice
from moeflow.planner.choices.processor_choice import ANY_ISA, choose_cpu_isa, choose_num_threads
from moeflow.planner.choices.rank_choice import explain_ranks
from moeflow.planner.choices.weight_choice import WeightChoice, explicit_choice
from moeflow.planner.configuration import Choices, engine_config
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES, PROCESS_BYTES, CostModel, IntegerPolicy
from moeflow.planner.costs.gpu_work_space import graph_bytes
from moeflow.planner.costs.hybrid_costs import HybridCosts
from moeflow.planner.costs.hybrid_sizes import HybridSizes
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.routing_profile import RoutingProfile
from moeflow.planner.estimate import Estimator, machine_reasons
from moeflow.planner.forecast import disk_reasons, forecast
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.host_forecast import Wanted
from moeflow.planner.known_routing import known_popularity, known_routing
from moeflow.planner.model_files import opened_model, path_in_plan
from moeflow.planner.offload_estimate import OffloadEstimator
from moeflow.planner.resident_experts import num_on_device, share_on_device
from moeflow.planner.search.device_search import Degrees, parallel_degrees, search_devices
from moeflow.planner.search.objective import Objective
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings, to_plain

_GPU: Final = "cuda:0"  # of a described machine


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the costs that it was found with."""

    plan: Plan
    model: CostModel
    objective: Objective
    estimator: Estimator | OffloadEstimator | None = None  # of the plan's configuration; None: it does not run here


def plan_described(
    settings: Settings,
    usage: Usage,
    machine_of: Callable[[Wanted], Machine],
    *,
    has_bfloat16: bool = True,
    routing: RoutingProfile | None = None,
) -> Planned:
    """Return the best plan for the machine with a device that `machine_of` returns.

    `has_bfloat16`: its device computes bfloat16 fast.

    Raises: CapacityError if nothing fits; CheckpointError if there is no such model; ConfigError if no device runs it.
    """
    with opened_model(str(settings.model), needs_weights=False) as (checkpoint, shape):
        usage.check(shape, str(settings.model))
        check_on_gpu(settings, shape)
        what = (settings, usage, checkpoint, shape, machine_of)
        try:
            return _Described(*what, has_bfloat16=has_bfloat16, routing=routing).plan()
        except CapacityError:
            if settings.quantize is not None or settings.dtype != "auto":
                raise
            return _Described(*what, has_bfloat16=has_bfloat16, routing=routing, is_streamed=True).plan()


class _Described:
    """The choices for one model on a machine with a device."""

    def __init__(
        self,
        settings: Settings,
        usage: Usage,
        checkpoint: Checkpoint | None,
        shape: ModelConfig,
        machine_of: Callable[[Wanted], Machine],
        *,
        has_bfloat16: bool,
        routing: RoutingProfile | None,
        is_streamed: bool = False,
    ) -> None:
        """`checkpoint` None: there is the model's shape alone. `is_streamed`: weights are floats, which can stream."""
        self.settings, self.usage, self.checkpoint, self.shape = settings, usage, checkpoint, shape
        self.has_bfloat16 = has_bfloat16
        self.routing = routing or known_routing(checkpoint, settings.cache_dir)
        self.weights = self._weights(own_on_device if not is_streamed else for_device)
        dtype = self.weights.embeddings
        kv_dtype = dtype if settings.kv_dtype == "auto" else settings.kv_dtype
        activation_bytes = 4 if dtype == "float32" else 2
        self.costs = ModelCosts(shape, self.weights.costed(kv_dtype, activation_bytes=activation_bytes))
        limit = settings.memory_bytes
        self.machine = machine_of(Wanted(costs=self.costs, packed_file=self._file_on_disk(limit)))
        check_number(settings, self.machine.num_devices)
        objective = usage.objective({} if limit is None else {RAM: limit}, has_device=True)
        self.objective = dataclasses.replace(objective, can_stream=not self.weights.is_planar)

    def plan(self) -> Planned:
        """Return the best plan. Raises: CapacityError if nothing fits."""
        usage, machine = self.usage, self.machine
        model, policy = search_devices(self._cost_model(), self.objective, self._numbers_of_devices())
        reasons = [("weights", f"{self.weights.name}: {self.weights.reason or 'as asked for'}")]
        choices = self._choices(model, policy)
        if choices.parallel is not None:
            explain_ranks(choices.parallel, self.shape, reasons, on_devices=True)
        why = (
            *_why(model, policy),
            *disk_reasons(model, policy),
            ("parallel degrees", self._degrees(policy).text),
            *machine_reasons(machine, choices.hybrid),
        )
        path = path_in_plan(str(self.settings.model))
        plan = Plan(
            config=engine_config(self.settings, self.shape, self.checkpoint, choices, reasons, model_path=path),
            settings=to_plain(self._settings(choices)),
            memory_bytes=ceil(model.predict(policy).memory[RAM]),
            goal=usage.goal,
            workload=usage.workload,
            machine=machine.name,
            machine_identity=machine.identity,
            forecast=forecast(model, policy, self.objective.memory_limits),
            reasons=(*reasons, *why),
        )
        estimator = (
            None if plan.config.hybrid is None else Estimator(plan.config, self.shape, machine, routing=self.routing)
        )
        return Planned(plan, model, self.objective, estimator)

    def _numbers_of_devices(self) -> list[int]:
        """Return the numbers of devices that can share the model, ascending: as asked, else powers of two.

        Raises: ConfigError if as many as asked cannot.
        """
        if (asked := self.settings.num_ranks) is not None:
            if asked > 1:
                possible_device_ranks(self.settings, self.costs)
            return [asked]
        powers = (2**power for power in range(self.machine.num_devices.bit_length()))
        return [number for number in powers if number == 1 or self._can_share(number)]

    def _can_share(self, number: int) -> bool:
        try:
            possible_device_ranks(dataclasses.replace(self.settings, num_ranks=number), self.costs)
        except ConfigError:
            return False
        return number <= self.machine.num_devices and not why_not_divided(self.shape, number)

    def _degrees(self, policy: Policy) -> Degrees:
        """Return what the devices do at once."""
        num_experts = self.shape.routing.num_experts
        return parallel_degrees(
            num_batches=self.settings.num_replicas or 1,
            num_devices=self.machine.num_devices,
            num_experts=num_experts,
            block_experts=num_experts,  # one launch computes those of a layer
            num_holding=policy.num_devices,
        )

    def _parallel(self, policy: Policy) -> ParallelConfig | None:
        """Return how ranks share the model; None: one device has it."""
        if policy.num_devices == 1:
            return None
        if not policy.is_resident and (reason := why_not_divided(self.shape, policy.num_devices)):
            raise ConfigError(f"{policy.num_devices} ranks (--ranks) cannot share the pipeline's layers: {reason}")
        settings = dataclasses.replace(self.settings, num_ranks=policy.num_devices)
        return possible_device_ranks(settings, self.costs)[0]

    def _cost_model(self) -> CostModel:
        """Return the costs, with those of a host that computes experts if the model has any."""
        known = (self.machine, self.costs, self.usage.workload)
        if not self._can_be_hybrid:
            return CostModel(*known, routing=self.routing, process_bytes=PROCESS_BYTES)
        experts = host_format(self.weights, self.checkpoint)
        return HybridCosts(*known, routing=self.routing, process_bytes=PROCESS_BYTES, host_format=experts)

    @property
    def _can_be_hybrid(self) -> bool:
        return can_be_hybrid(self.settings, self.shape) and are_shared(self.weights, self.shape)

    def _file_on_disk(self, memory_bytes: int | None) -> Path | None:
        """Return the file that experts come from in so much main memory; None: all fit, or it is not limited."""
        if memory_bytes is None or not self._can_be_hybrid:
            return None
        sizes = HybridSizes(self.costs, host_format(self.weights, self.checkpoint))
        if sizes.on_host.experts_bytes + PROCESS_BYTES <= memory_bytes:
            return None
        return plan_on_disk(self.checkpoint, self.shape, self.weights, sizes, self.settings).packed_weights_file

    def _weights(self, of_file: Callable[..., WeightChoice]) -> WeightChoice:
        """Return the formats of the weights on a device; `of_file` chooses where the user does not."""
        if self.settings.quantize is not None:
            made = quantized_on_device(self.settings, has_bfloat16=self.has_bfloat16)
            return made if self.checkpoint is None else made.with_routers(self.checkpoint)
        chosen = explicit_choice(self.settings.dtype, None, self.shape, can_pack=False)
        if self.checkpoint is None:
            chosen = chosen or in_half(has_bfloat16=self.has_bfloat16)
            return dataclasses.replace(chosen, routers="bfloat16" if chosen.matrices == "bfloat16" else "float32")
        chosen = chosen or of_file(self.checkpoint, has_bfloat16=self.has_bfloat16)
        return chosen.with_routers(self.checkpoint)

    @property
    def _gpu(self) -> str:
        """The GPU that computes, as torch calls it."""
        device = self.settings.device
        return _GPU if device == "auto" else parse_cuda_device(device)[0]

    def _choices(self, model: CostModel, policy: Policy) -> Choices:
        """Return the decisions that carry a policy out.

        Requests are as long as the workload's at most: what stays where is made for these.
        """
        max_tokens, number = model.workload.max_tokens, policy.num_devices
        num_blocks = policy.batch_size * ceil(max_tokens / BLOCK_SIZE)
        is_streamed = pipeline_of(model, policy) not in (RESIDENT, HYBRID)
        offload = _offload(model, policy, num_blocks, self._gpu) if is_streamed else None
        kv_dtype = self.costs.formats.kv
        if offload is not None and kv_dtype == "float16":
            kv_dtype = "bfloat16"  # of the same size, and known to the kernels with which the host attends
        return Choices(
            device=self._gpu if offload is None else "cpu",
            cpu_isa="",
            dtype=self.weights.embeddings,
            weights=self.weights,
            num_threads=self._num_threads() // number,
            batching=Batching(policy.batch_size, IntegerPolicy.of(policy).pass_tokens),
            cache=KVCacheChoice(kv_dtype, num_blocks, ceil(BLOCK_SIZE * self.costs.kv_bytes / number), max_tokens),
            shares_prefixes=False,
            parallel=self._parallel(policy),
            hybrid=self._hybrid(model, policy),
            experts=self._slots(model, policy),
            offload=offload,
            gpu_memory_bytes=self.machine.level(DEVICE).capacity_bytes,
            memory=self._memory(model, policy),
        )

    def _hybrid(self, model: CostModel, policy: Policy) -> HybridConfig | None:
        """Return what the device and the processor share; None: the processor computes no experts."""
        if policy.num_gpu_experts is None:
            return None
        assert isinstance(model, HybridCosts), "such a policy was found with these costs"
        isa = "" if self.checkpoint is None else choose_cpu_isa(self.settings.cpu_isa, "cpu", [])
        number, tokens = policy.num_gpu_experts, policy.chunk_tokens
        choices = known_popularity(self.checkpoint, self.settings.cache_dir)
        return hybrid_config(model.sizes, model, number, cpu_isa=isa or ANY_ISA, max_tokens=tokens, popularity=choices)

    def _slots(self, model: CostModel, policy: Policy) -> ExpertSlotsConfig | None:
        """Return the slots for experts in main memory; None: it has all that the processor computes."""
        if policy.num_gpu_experts is None or not isinstance(model, HybridCosts) or model.num_host_slots is None:
            return None
        plan = plan_on_disk(self.checkpoint, self.shape, self.weights, model.sizes, self.settings)
        return plan.config(model.num_host_slots)

    def _num_threads(self) -> int:
        """Return the threads of each process, on the machine that makes the plan; 0: there is nothing to run."""
        if self.checkpoint is None:
            return self.settings.num_threads or 0
        return choose_num_threads(self.settings.num_threads, host_resources(), [])

    def _memory(self, model: CostModel, policy: Policy) -> MemoryPlan | None:
        """Return what a limit is divided into; None: there is none."""
        limit = self.settings.memory_bytes
        if limit is None:
            return None
        return MemoryPlan(
            limit_bytes=limit,
            process_bytes=model.process_bytes,
            weight_bytes=ceil(self._main_bytes(model, policy)),
            work_bytes=0,
            is_served=self.settings.is_served,
        )

    def _main_bytes(self, model: CostModel, policy: Policy) -> float:
        """Return the bytes of weights in main memory, those on their way to the device included."""
        if policy.num_gpu_experts is not None:
            return model.memory_of(policy)[RAM] - model.process_bytes
        return self.costs.model_bytes

    def _settings(self, choices: Choices) -> Settings:
        """Return settings that name the machine's device, and the places and sizes that were chosen for it."""
        settings, offload = self.settings, choices.offload
        if choices.parallel is not None:
            settings = dataclasses.replace(settings, num_ranks=choices.parallel.num_ranks)
        if offload is None:
            return dataclasses.replace(settings, device=choices.device)
        assert offload.cuda is not None, "described devices are GPUs"
        num_experts = max(self.shape.routing.num_experts, 1)
        return dataclasses.replace(
            settings,
            device=f"{offload.cuda.name}:{offload.cuda.memory_bytes}",
            gpu_memory_bytes=None,
            max_model_len=choices.cache.max_model_len,
            max_num_batched_tokens=choices.batching.max_num_batched_tokens,
            pipeline=offload.pipeline,
            micro_batch=offload.micro_batch_tokens,
            prompt_micro_batch=offload.prompt_micro_batch_tokens,
            hosted_experts=(offload.num_hosted_experts or 0) / num_experts,
            resident_experts=offload.num_resident_experts / num_experts,
            resident_kv=offload.num_resident_kv_layers / self.shape.num_layers,
        )


def _offload(model: CostModel, policy: Policy, num_blocks: int, gpu: str) -> OffloadConfig:
    shape, memory_bytes = model.costs.shape, model.machine.level(DEVICE).capacity_bytes
    choice = IntegerPolicy.of(policy)
    window = choice.window_requests * ceil(model.workload.max_tokens / BLOCK_SIZE)
    costs = model.costs
    resident = share_on_device(costs.layers_bytes, costs.movable_bytes, policy.weights_on_device)
    return OffloadConfig(
        cuda=CudaDeviceConfig(
            name=gpu, memory_bytes=memory_bytes, capacity_bytes=max(memory_bytes - DEVICE_RESERVE_BYTES, 0)
        ),
        pipeline=pipeline_of(model, policy),
        micro_batch_tokens=policy.micro_batch,
        prompt_micro_batch_tokens=policy.prompts * model.workload.prompt_len,
        num_resident_experts=num_on_device(resident, model.num_experts),
        num_resident_kv_layers=round(policy.kv_on_device * shape.num_layers),
        window_blocks=0 if choice.keeps_kv else min(window, num_blocks),
        num_hosted_experts=round(policy.experts_on_host * shape.routing.num_experts),
    )


def pipeline_of(model: CostModel, policy: Policy) -> str:
    """Return the name of the pipeline that carries out a device's policy (MoE-Lightning 4.1)."""
    assert model.has_device
    if policy.num_gpu_experts is not None:
        return HYBRID
    if not policy.attention_on_device:
        return "cgopipe"
    if policy.kv_on_device < 1:
        return "flexgen"  # S4: keys and values are fetched for each micro-batch
    return RESIDENT if policy.weights_on_device == 1 else "zero-inference"


def _why(model: CostModel, policy: Policy) -> list[tuple[str, str]]:
    """Return the reasons for a policy: (field, why)."""
    attends = "faster there" if policy.attention_on_device else "faster than fetching keys and values"
    if policy.num_gpu_experts is not None:
        attends = "keys and values stay there"
    return [
        ("attention_on_device", attends),
        ("weights_on_device", "what the device has room for beside the batch"),
        ("num_devices", f"{policy.num_devices} of {model.machine.num_devices}"),
        *_work_space(model, policy),
    ]


def _work_space(model: CostModel, policy: Policy) -> list[tuple[str, str]]:
    """Return the memory of captured passes, which only a device with the whole model has."""
    if pipeline_of(model, policy) != RESIDENT:
        return []
    return [("work space", f"{format_bytes(graph_bytes(model.costs, policy.batch_size))} for CUDA graphs")]
