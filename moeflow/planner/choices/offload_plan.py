"""Decides which experts stay on a device that cannot hold the whole model: as many as fit into its memory.

Only headers are read. Sizes are those of the cost model, which leaves out little; what then does not fit after all is
refused when it is allocated.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import (
    CUDA,
    PREFIX,
    CudaDeviceConfig,
    DeviceConfig,
    EmulatedDeviceConfig,
    OffloadConfig,
    parse_cuda_device,
    parse_emulated_device,
)
from moeflow.core.units import format_bytes
from moeflow.pipeline.catalog import OFFLOADING, Pipeline
from moeflow.pipeline.offloading import NUM_WINDOWS
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.process_memory import PROCESS_BYTES
from moeflow.planner.resident_experts import device_bytes, most_on_device
from moeflow.settings.settings import Settings

DEFAULT_PIPELINE: Final = "cgopipe"
DEFAULT_MICRO_BATCH: Final = 32  # tokens
DEFAULT_PROMPT_MICRO_BATCH: Final = 512  # tokens: each micro-batch reads all of a layer's experts on the device
_MARGIN: Final = 1.02  # of sizes that are worked out: for what the cost model leaves out, and packing fills up


def costs_of(shape: ModelConfig, config: EngineConfig) -> ModelCosts:
    """Return what the stages of a model cost in an engine's formats."""
    return ModelCosts(
        shape,
        Formats(
            matrices=config.weight_format,
            embeddings=config.embedding_format,
            kv=config.kv_dtype,
            activation_bytes=4 if config.dtype == "float32" else 2,
            routers=config.router_format,
            head=config.head_format or None,
            layer_table=config.layer_table_format or None,
            is_table_on_disk=bool(config.packed_file),
            layers=config.layer_formats,
            is_wide=config.is_wide,
        ),
    )


def activation_bytes(costs: ModelCosts, limits: SchedulerConfig, *micro_batch_tokens: int) -> float:
    """Return the activation bytes of a pass on a device. A long request is a micro-batch of its own."""
    num_tokens = limits.max_num_batched_tokens
    return costs.pass_activation_bytes(num_tokens, min(max(*micro_batch_tokens, limits.max_model_len), num_tokens))


_ASKED: Final = {  # setting -> field
    "pipeline": "pipeline",
    "micro_batch": "micro_batch_tokens",
    "prompt_micro_batch": "prompt_micro_batch_tokens",
    "hosted_experts": "hosted_experts",
    "resident_experts": "resident_experts",
    "resident_kv": "resident_kv",
}


class OffloadOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """What the user said; None: decide for me."""

    device: DeviceConfig
    pipeline: str | None = None
    micro_batch_tokens: int | None = None
    prompt_micro_batch_tokens: int | None = None
    hosted_experts: float | None = None  # share that the host computes
    resident_experts: float | None = None  # share (r_w of MoE-Lightning)
    resident_kv: float | None = None  # share of layers (r_c)


def offload_overrides(settings: Settings, cuda_bytes: int) -> OffloadOverrides | None:
    """Return what the user said of a device that is smaller than the model; None if none is asked for.

    `cuda_bytes` are those of a GPU that may be used, unless the user says it with the device.

    Raises: ConfigError, also for settings that need such a device.
    """
    asked = {name: getattr(settings, name) for name in _ASKED}
    is_asked = any(value is not None for value in asked.values())
    found = _device(settings.device, cuda_bytes, is_smaller=is_asked)
    if found is None:
        for name, value in asked.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is for a device that is smaller than the model: ask for one (--device "
                    f"{PREFIX}:16GiB,12 or {CUDA}:16GiB), or remove it"
                )
        return None
    return OffloadOverrides(device=found, **{field: asked[name] for name, field in _ASKED.items()})


def _device(device: str, cuda_bytes: int, *, is_smaller: bool) -> DeviceConfig | None:
    """Return the device if it is one that weights are streamed to; a GPU is if its memory or a pipeline is named."""
    kind = device.split(":")[0]
    if kind == PREFIX:
        return parse_emulated_device(device)
    if kind != CUDA:
        return None
    name, memory_bytes = parse_cuda_device(device)
    if memory_bytes is None and not is_smaller:
        return None
    memory_bytes = memory_bytes or cuda_bytes
    return CudaDeviceConfig(name=name, memory_bytes=memory_bytes, capacity_bytes=max(memory_bytes - PROCESS_BYTES, 0))


def plan_offload(overrides: OffloadOverrides, costs: ModelCosts, limits: SchedulerConfig) -> OffloadConfig:
    """Return what stays where. Raises: ConfigError, CapacityError."""
    name = overrides.pipeline or DEFAULT_PIPELINE
    if name not in OFFLOADING:
        raise ConfigError(f"pipeline {name!r} is unknown; use one of {', '.join(OFFLOADING)}")
    pipeline, num_layers = OFFLOADING[name], costs.shape.num_layers
    micro_batch = overrides.micro_batch_tokens or DEFAULT_MICRO_BATCH
    of_prompts = overrides.prompt_micro_batch_tokens or max(micro_batch, DEFAULT_PROMPT_MICRO_BATCH)
    kv_layers = _resident_kv_layers(overrides.resident_kv, pipeline, num_layers)
    window_blocks = _window_blocks(pipeline, micro_batch, of_prompts, limits) if kv_layers < num_layers else 0
    window_block_bytes = costs.shape.most_kv_bytes_per_token(costs.formats.kv) * limits.block_size
    fixed_bytes = (
        (costs.model_bytes - _expert_bytes(costs) * num_layers) * _MARGIN
        + activation_bytes(costs, limits, micro_batch, of_prompts)
        + kv_layers * limits.num_blocks * costs.kv_layer_bytes * limits.block_size
        + NUM_WINDOWS * window_blocks * window_block_bytes
    )
    device, num_resident = overrides.device, _resident_experts(overrides, costs, fixed_bytes)
    return OffloadConfig(
        emulated=device if isinstance(device, EmulatedDeviceConfig) else None,
        cuda=device if isinstance(device, CudaDeviceConfig) else None,
        pipeline=name,
        micro_batch_tokens=micro_batch,
        prompt_micro_batch_tokens=of_prompts,
        num_resident_experts=num_resident,
        num_resident_kv_layers=kv_layers,
        window_blocks=window_blocks,
        num_hosted_experts=_hosted_experts(overrides, pipeline, costs, num_resident),
    )


def _resident_kv_layers(share: float | None, pipeline: Pipeline, num_layers: int) -> int:
    """Return the layers whose keys and values stay on the device. Raises: ConfigError."""
    if share is None:
        return 0 if pipeline.has_kv_on_host else num_layers
    if not 0 <= share <= 1:
        raise ConfigError(f"resident_kv is a share, from 0 to 1, not {share:g}")
    if share < 1 and not pipeline.has_kv_on_host:
        raise ConfigError(
            f"{pipeline.name} keeps all keys and values on the device, but resident_kv is {share:g}: "
            "use --pipeline flexgen, or remove resident_kv"
        )
    return round(share * num_layers)


def _window_blocks(pipeline: Pipeline, micro_batch: int, of_prompts: int, limits: SchedulerConfig) -> int:
    """Return the blocks over which the device attends: of a micro-batch of prompts, or one of any requests."""
    blocks_per_request = -(-limits.max_model_len // limits.block_size)
    number = 1 if pipeline.attends_on_host else micro_batch
    most_tokens = min(of_prompts, limits.max_num_batched_tokens)
    return min(max(number * blocks_per_request, -(-most_tokens // limits.block_size)), limits.num_blocks)


def _hosted_experts(
    overrides: OffloadOverrides, pipeline: Pipeline, costs: ModelCosts, num_resident: int
) -> int | None:
    """Return how many experts of each layer the host computes; None: as many as it measures to be best.

    Raises: ConfigError.
    """
    share = overrides.hosted_experts
    if share is None:
        return None if _may_share(overrides.device) else 0
    if not 0 <= share <= 1:
        raise ConfigError(f"hosted_experts is a share, from 0 to 1, not {share:g}")
    if share and pipeline.make_sharing_tasks is None:
        raise ConfigError(
            f"in {pipeline.name} the host computes no experts, but hosted_experts is {share:g}: "
            f"use --pipeline {DEFAULT_PIPELINE}, or remove hosted_experts"
        )
    num_experts = costs.shape.routing.num_experts
    return min(round(share * num_experts), max(num_experts - num_resident, 0))


def _may_share(device: DeviceConfig) -> bool:
    """Return whether the host may compute experts, as many as it measures to be best.

    Host and device must round alike, so that any number of experts gives the same answers. They must also compute
    concurrently: a device without a pace of its own is the host's processor.
    """
    return (
        isinstance(device, EmulatedDeviceConfig) and not device.computes_in_torch and bool(device.speeds.device_flops)
    )


def _resident_experts(overrides: OffloadOverrides, costs: ModelCosts, fixed_bytes: float) -> int:
    """Return how many experts of each layer stay, with memory left for two layers' others."""
    shape = costs.shape
    num_experts = max(shape.routing.num_experts, 1)
    sizes = (shape.num_layers, num_experts, _expert_bytes(costs) / num_experts * _MARGIN)
    left = overrides.device.capacity_bytes - fixed_bytes
    requested = overrides.resident_experts
    if requested is not None and not 0 <= requested <= 1:
        raise ConfigError(f"resident_experts is a share, from 0 to 1, not {requested:g}")
    number = most_on_device(left, *sizes) if requested is None else round(requested * num_experts)
    least = fixed_bytes + device_bytes(number or 0, *sizes)
    if number is not None and least <= overrides.device.capacity_bytes:
        return number
    raise CapacityError(
        f"the device has {format_bytes(overrides.device.capacity_bytes)}, but this model and these limits need "
        f"{format_bytes(least)} of it: {format_bytes(fixed_bytes)} for weights outside of experts, activations, and "
        f"keys and values, {format_bytes(least - fixed_bytes)} for experts. Give the device more memory, or ask for "
        "smaller micro-batches, fewer concurrent requests (--max-num-seqs), shorter ones (--max-model-len), another "
        "pipeline, or a smaller weight format"
    )


def _expert_bytes(costs: ModelCosts) -> float:
    """Return the bytes of a layer's experts, or of a dense layer's network; of the larger, if there are both."""
    dense = costs.dense_values * costs.formats.weight_bytes if costs.num_dense_layers else 0.0
    return max(costs.shape.routing.num_experts * costs.expert_bytes, dense)
