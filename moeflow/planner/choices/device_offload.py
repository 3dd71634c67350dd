"""Choices that differ where a device is smaller than the model and a pipeline brings it the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import PREFIX, CudaDeviceConfig
from moeflow.core.units import format_bytes
from moeflow.kernels.cpu import extension
from moeflow.parallel.blocks import shape_of_rank
from moeflow.planner.choices.memory_allowance import allowed_bytes
from moeflow.planner.choices.offload_plan import OffloadOverrides, costs_of, offload_overrides, plan_offload
from moeflow.planner.choices.processor_choice import Reasons, no_cuda
from moeflow.planner.choices.refused_settings import PIPELINES, why_refused
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings, given_options

OFFLOADED_MAX_NUM_SEQS: Final = 256  # where weights go to a device each pass: the more requests share that, the better
OFFLOADED_NUM_BATCHED_TOKENS: Final = 2048
_NOT_ON_DEVICES: Final = (
    "memory_bytes",
    "prompt_cache",
    "prompt_cache_bytes",
    "record_routing",
    "stages",
    "expert_placement",
    "rank_schedule",
    "num_redundant_experts",
    "num_replicas",
)


def device_overrides(settings: Settings, machine: HostResources) -> OffloadOverrides | None:
    """Return what the user said of a device that is smaller than the model. Raises: ConfigError, CapacityError."""
    cuda_bytes = settings.gpu_memory_bytes or machine.accelerator_free_bytes
    overrides = offload_overrides(settings, cuda_bytes)
    if overrides is None:
        return None
    if not isinstance(overrides.device, CudaDeviceConfig):
        if settings.gpu_memory_bytes is not None:
            raise ConfigError("--gpu-memory limits a GPU's memory; an emulated one's stands in --device: remove it")
        return overrides
    if machine.accelerator is None:
        raise no_cuda(settings.device, machine)
    memory_bytes = allowed_bytes("device memory", overrides.device.memory_bytes, machine.accelerator_free_bytes)
    if settings.gpu_memory_bytes not in (None, memory_bytes):
        raise ConfigError(
            f"--device {settings.device} and --gpu-memory {format_bytes(cuda_bytes)} say different things: "
            "remove one of them"
        )
    return overrides


def computes_in_torch(overrides: OffloadOverrides) -> bool:
    """Return whether torch computes on the device, and not the CPU kernels that emulate it."""
    return isinstance(overrides.device, CudaDeviceConfig) or overrides.device.computes_in_torch


def check_pipelines(shape: ModelConfig) -> None:
    """Raise ConfigError for a model that no pipeline runs."""
    if reason := why_refused(shape, PIPELINES):
        raise ConfigError(reason)


def settings_of_host(settings: Settings, overrides: OffloadOverrides, usage: Usage) -> Settings:
    """Return what holds for the host of a smaller device. Raises: ConfigError for what pipelines do not do."""
    if settings.quantize is not None and computes_in_torch(overrides):
        raise ConfigError(
            "--quantize does not go with a GPU that is smaller than the model, which computes with floats: remove it, "
            "or use --device cpu"
        )
    for flag, value in given_options(settings, _NOT_ON_DEVICES).items():
        if value != 1:
            raise ConfigError(f"{flag} does not go with a device that is smaller than the model: remove one of them")
    return replace(
        settings,
        device="cpu",
        gpu_memory_bytes=None,
        num_ranks=None,  # which share the devices, and the host as they do
        expert_layout="auto",
        attention_layout="auto",
        prefix_caching=False,  # or micro-batches could need blocks that others of the same pass write
        max_num_seqs=settings.max_num_seqs or usage.num_sequences or OFFLOADED_MAX_NUM_SEQS,
        max_num_batched_tokens=settings.max_num_batched_tokens
        or max(OFFLOADED_NUM_BATCHED_TOKENS, settings.max_num_seqs or usage.num_sequences or 0),
    )


def with_pipeline(
    config: EngineConfig, overrides: OffloadOverrides, shape: ModelConfig
) -> tuple[EngineConfig, Reasons]:
    """Return a configuration whose passes go through a pipeline, and why. Raises: ConfigError, CapacityError."""
    costs = costs_of(shape_of_rank(shape, config.parallel), config)
    offload = plan_offload(overrides, costs, config.scheduler)
    if not config.cpu_isa and not offload.computes_in_torch:
        raise ConfigError(
            f"an emulated device computes with the CPU extension: {extension.why_not()}. Install it, or have "
            f"torch compute: --device {PREFIX}:MEMORY,LINK,torch"
        )
    how = f"{offload.pipeline}, in micro-batches of {offload.micro_batch_tokens} tokens"
    stay = f"{offload.num_resident_experts} of {max(shape.routing.num_experts, 1)} a layer stay on the device"
    reasons = [("pipeline", how), ("experts", stay)]
    if offload.num_resident_kv_layers:
        kept = f"{offload.num_resident_kv_layers} of {shape.num_layers} layers' stay on the device"
        reasons.append(("keys and values", kept))
    if offload.cuda is None:
        return replace(config, offload=offload), reasons
    memory_bytes = offload.cuda.memory_bytes
    where = f"{offload.cuda.name}, {format_bytes(memory_bytes)} of it: experimental"
    return replace(config, offload=offload, gpu_memory_bytes=memory_bytes), [*reasons, ("device", where)]
