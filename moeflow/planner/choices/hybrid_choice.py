"""How a GPU that is smaller than the model shares its experts with the CPU, and whether that is faster than the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE
from moeflow.core.hybrid_config import HybridConfig
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import CUDA, parse_cuda_device
from moeflow.core.plan import Forecast, Workload
from moeflow.core.units import format_bytes
from moeflow.experts.predict.registry import NO_PREDICTOR
from moeflow.kernels.packed_bands import FORMATS
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.packing import slab_spec
from moeflow.planner.choices.batching_choice import Batching
from moeflow.planner.choices.device_weights import for_device, own_on_device, stored_formats
from moeflow.planner.choices.expert_plan import ExpertPlan, spec_of_shape
from moeflow.planner.choices.gpu_batching import SpareMemory, gpu_batching, one_prompt
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.weight_choice import WeightChoice, instead_of
from moeflow.planner.costs.hybrid_costs import HybridCosts
from moeflow.planner.costs.hybrid_sizes import HybridSizes, Passes
from moeflow.planner.search.hybrid_search import hybrid_policy, search_hybrid
from moeflow.planner.search.objective import FINE, WHY_SO_MANY, Objective
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings


def can_be_hybrid(settings: Settings, shape: ModelConfig) -> bool:
    """Return whether the CPU may compute experts for a GPU; not where the user asks for a pipeline or ranks."""
    is_cuda = settings.device.split(":")[0] == CUDA
    names_memory = is_cuda and parse_cuda_device(settings.device)[1] is not None
    asked = (settings.pipeline, settings.micro_batch, settings.resident_experts)
    is_one = (settings.num_ranks or 1) == 1
    return bool(shape.routing.num_experts) and is_one and not names_memory and asked == (None, None, None)


def are_shared(weights: WeightChoice, shape: ModelConfig) -> bool:
    """Return whether both processors have kernels for these experts."""
    if not weights.layers:
        return weights.matrices in (*FORMATS, "float16")  # see `host_format`
    layers = map(weights.layers.__getitem__, shape.moe_layers)
    return {name for it in layers for name in (it.up, it.down)} <= {*FORMATS}


def shared_weights(shape: ModelConfig, checkpoint: Checkpoint, *, has_bfloat16: bool) -> WeightChoice:
    """Return the checkpoint's own formats if both processors have kernels for its experts, else floats."""
    own = own_on_device(checkpoint, has_bfloat16=has_bfloat16)
    return own if are_shared(own, shape) else for_device(checkpoint, has_bfloat16=has_bfloat16)


def host_format(weights: WeightChoice, checkpoint: Checkpoint | None) -> WeightFormat:
    """Return the format of experts on the CPU, which keeps the values of a GPU's `weights`.

    The CPU has no kernels for float16. A checkpoint in bfloat16 stays so, and any other becomes float32.
    """
    if weights.matrices != "float16":
        return weights.matrices
    is_narrow = checkpoint is None or stored_formats(checkpoint) <= {"bfloat16"}
    return "bfloat16" if is_narrow else "float32"


def hybrid_batching(
    default: Batching,
    settings: Settings,
    usage: Usage,
    sizes: HybridSizes,
    costs: HybridCosts | None,
    limits: Mapping[str, int],
) -> Batching:
    """Return the batching that suits the usage. `costs` None: the machine's speed is unknown.

    `limits` are the bytes of each tier for what `sizes` counts.
    """
    objective = usage.objective(limits, has_device=True)
    left_bytes = limits[DEVICE] - sizes.device_bytes(0, Passes(0, 1), 0)
    spare = SpareMemory.of(left_bytes, sizes.costs, settings, usage.workload)
    speed = None if costs is None else HybridSpeed(costs, objective)
    found = gpu_batching(default, settings, usage, spare, speed)
    if costs is None or settings.max_num_seqs is not None or usage.is_interactive:
        return found
    policy = search_hybrid(costs, objective, FINE)
    if policy is None:
        return found
    tokens = max(found.max_num_batched_tokens, policy.batch_size)
    return replace(
        found, max_num_seqs=policy.batch_size, max_num_batched_tokens=tokens, why_seqs=WHY_SO_MANY[usage.goal]
    )


class HybridSpeed(msgspec.Struct, frozen=True):
    """The speed of a GPU that shares experts with the CPU."""

    costs: HybridCosts
    objective: Objective

    def step_s(self, number: int) -> float:
        """See `GpuSpeed`."""
        policy = hybrid_policy(self.costs, self.objective, number)
        return float("inf") if policy is None else self.costs.predict(policy).decode_s

    def pass_s(self, num_tokens: int) -> float:
        """See `GpuSpeed`."""
        policy = hybrid_policy(self.costs, self.objective, 1)
        costs = replace(self.costs, workload=one_prompt(num_tokens))
        return float("inf") if policy is None else costs.predict(replace(policy, chunk_tokens=num_tokens)).first_token_s


class SharedExperts(msgspec.Struct, frozen=True):
    """A model whose experts a GPU and the CPU share, in the memory that there is."""

    sizes: HybridSizes
    cpu_isa: str  # that computes the CPU's experts
    passes: Passes
    popularity: str  # the file of known choices; empty: none are known
    packed_experts_file: str  # packed weights that have the experts; empty: none are known
    on_disk: ExpertPlan | None  # of experts without a slot in main memory; None: it has all
    num_host_slots: int | None  # in main memory; likewise
    capacity_bytes: int  # of the GPU, for all that `HybridSizes` counts

    def bytes_for_kv(self, weights: WeightChoice, device: str) -> int:
        """Return what keys and values may take of the GPU. Raises: CapacityError if the other weights do not fit."""
        need_bytes = self.sizes.device_bytes(0, self.passes, 0)
        if need_bytes > self.capacity_bytes:
            raise CapacityError(
                f"without experts, the model needs {format_bytes(need_bytes)} in {weights.name}, but "
                f"{format_bytes(self.capacity_bytes)} of {device} are free: use {instead_of(weights.matrices)}, or "
                "--device cpu"
            )
        return self.capacity_bytes - need_bytes

    def config(self, kv_bytes: int, costs: HybridCosts | None, *, max_num_seqs: int, reasons: Reasons) -> HybridConfig:
        """Return how experts are shared beside keys and values of so many bytes.

        `costs` None: the machine's speed is unknown, and no experts are copied.
        """
        number = self.sizes.most_gpu_experts(self.capacity_bytes, self.passes, kv_bytes) or 0
        if costs is not None:
            number = costs.best_gpu_experts(max_num_seqs, number)
        if self.packed_experts_file:
            reasons.append(("start", f"experts are read from {self.packed_experts_file}, as `moeflow pack` left them"))
        reasons.append(("hybrid", f"{number} of {self.sizes.num_experts} experts of each layer are on the GPU"))
        return hybrid_config(
            self.sizes,
            costs,
            number,
            cpu_isa=self.cpu_isa,
            max_tokens=self.passes.num_tokens,
            popularity=self.popularity,
            packed_experts_file=self.packed_experts_file,
        )


def plan_on_disk(
    checkpoint: Checkpoint | None, shape: ModelConfig, weights: WeightChoice, sizes: HybridSizes, settings: Settings
) -> ExpertPlan:
    """Return how experts come from disk, as the CPU computes them. Nothing predicts them."""
    own = host_format(weights, checkpoint)
    if checkpoint is None:
        spec = spec_of_shape(sizes.on_host, replace(weights, matrices=own))
    else:
        spec = slab_spec(checkpoint, weights.formats.on_host(own))
    return ExpertPlan.make(checkpoint, shape, spec, replace(settings, predictor=NO_PREDICTOR))


def hybrid_config(
    sizes: HybridSizes,
    costs: HybridCosts | None,
    num_gpu_experts: int,
    *,
    cpu_isa: str,
    max_tokens: int,
    popularity: str,
    packed_experts_file: str = "",
) -> HybridConfig:
    """Return the configuration for passes over so many tokens at most.

    `popularity` and `packed_experts_file` are files, or empty.
    """
    return HybridConfig(
        num_gpu_experts=num_gpu_experts,
        cpu_weight_format=sizes.host_format,
        cpu_isa=cpu_isa,
        stream_tokens=0 if costs is None else costs.stream_tokens(num_gpu_experts, max_tokens),
        popularity_file=popularity,
        packed_experts_file=packed_experts_file,
    )


class Compared(NamedTuple):
    """What a model brings on a GPU that is too small for it, and on the CPU alone, in tokens a second."""

    hybrid: float
    cpu: float

    @classmethod
    def of(cls, hybrid: Forecast, cpu: Forecast, usage: Usage) -> Compared:
        """Compare what the usage asks for: one request where people wait, else all concurrent ones."""
        if usage.goal == "latency" or usage.is_interactive:
            return cls(*(_alone_tokens_per_s(it, usage.workload) for it in (hybrid, cpu)))
        return cls(hybrid.tokens_per_s.value, cpu.tokens_per_s.value)

    @property
    def is_worth(self) -> bool:
        """Whether the GPU helps."""
        return self.hybrid > self.cpu

    def reason(self, gpu: str) -> str:
        """Return the decision on the device, with both figures."""
        if self.is_worth:
            how = f"{gpu}: smaller than the model, so the CPU computes some experts"
            return f"{how}: {self.hybrid:.3g} tokens/s expected, {self.cpu:.3g} on the CPU alone"
        how = f"cpu: {gpu} is smaller than the model, and sharing experts with it does not help"
        return f"{how}: {self.cpu:.3g} tokens/s expected, {self.hybrid:.3g} with {gpu}"


def _alone_tokens_per_s(forecast: Forecast, workload: Workload) -> float:
    """Return the tokens a second of one request, its prompt included."""
    decode_s = (workload.gen_len - 1) / forecast.decode_alone_tokens_per_s.value
    return workload.gen_len / (forecast.time_to_first_token_s.value + decode_s)
