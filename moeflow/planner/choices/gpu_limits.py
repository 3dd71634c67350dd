"""Models and settings that no GPU runs: one list of reasons, for the automatic choice and for errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import EXPERT_LAYOUTS
from moeflow.kernels.triton.planar_rows import MADE_FORMATS
from moeflow.kernels.triton.planar_weights import GROUP
from moeflow.planner.choices.kv_cache_choice import MIN_KV_TOKENS
from moeflow.planner.choices.refused_settings import DEVICES, refusing_kind
from moeflow.planner.choices.speculation_choice import AUTO as DRAFTS_IF_USEFUL
from moeflow.planner.hardware.host import HostResources
from moeflow.settings.settings import Settings, given_options
from moeflow.speculation.registry import SPECULATORS

_RANKS: Final = "ranks with stages, and on other machines, compute with the CPU's kernels"
_MOVES: Final = "experts move among ranks that compute with the CPU's kernels"
_REPLICAS: Final = "replicas compute with the CPU's kernels"
_PROMPTS: Final = "only the CPU's kernels compute the same keys and values every time"
_ON_CPU_ONLY: Final[Mapping[str, str]] = {  # field of `Settings` -> reason
    "packed_weights_file": "it has weights in the layout of the CPU's kernels",
    "prompt_cache": _PROMPTS,
    "prompt_cache_bytes": _PROMPTS,
    "stages": _RANKS,
    "listen_ranks": _RANKS,
    "ray_address": _RANKS,
    "expert_placement": _MOVES,
    "num_redundant_experts": _MOVES,
    "expert_layout": "ranks on GPUs know the layouts of moeflow only",
    "rank_schedule": "only ranks that compute with the CPU's kernels take turns",
    "num_replicas": _REPLICAS,
    "max_replicas": _REPLICAS,
    "target_first_token_s": _REPLICAS,
    "remote_experts": "lenders keep experts that the CPU reads from disk",
}
_NEUTRAL: Final[Mapping[str, Sequence[object]]] = {  # values of these that GPUs take; of others None
    "num_replicas": (None, 1),
    "expert_placement": ("auto", "index"),
    "expert_layout": ("auto", *EXPERT_LAYOUTS),
    "rank_schedule": ("auto", "synchronous"),
}


class GpuRefusal(msgspec.Struct, frozen=True):
    """Why no GPU runs a model as asked."""

    reason: str
    remedy: str


def gpu_refusal(settings: Settings, shape: ModelConfig) -> GpuRefusal | None:
    """Return why no GPU runs a model with these settings; None: one that is large enough does."""
    if kind := refusing_kind(shape, DEVICES):
        return GpuRefusal(f"GPUs do not run {kind}, which this model has ({shape.model_type})", "use --device cpu")
    if settings.quantize is not None and (why := _why_not_quantized(settings.quantize, shape)):
        return GpuRefusal(f"--quantize is for the processor: {why}", "use --device cpu, or remove --quantize")
    for speculator in {*settings.speculators} - {*SPECULATORS, DRAFTS_IF_USEFUL}:
        why = "models that draft compute with the CPU's kernels"
        return GpuRefusal(f"--speculator {speculator} is for the processor: {why}", "use --device cpu, or suffix")
    for name, why in _ON_CPU_ONLY.items():
        if getattr(settings, name) not in _NEUTRAL.get(name, (None,)):
            for flag in given_options(settings, (name,)):
                return GpuRefusal(f"{flag} is for the processor: {why}", f"use --device cpu, or remove {flag}")
    return None


def _why_not_quantized(quantize: str, shape: ModelConfig) -> str:
    """Return why a GPU does not keep the matrices of layers in a format; empty: it does."""
    if quantize not in MADE_FORMATS:
        return f"GPUs quantize weights to {' or '.join(MADE_FORMATS)}"
    odd = next((width for width in sorted(_row_widths(shape)) if width % GROUP), 0)
    return f"a row of {odd} values does not divide into groups of {GROUP}" if odd else ""


def _row_widths(shape: ModelConfig) -> set[int]:
    """Return how many columns the matrices of layers have; 0 for some that are not there."""
    attention, networks, table = shape.attention, shape.feed_forward, shape.embeddings.layer_embeddings
    heads = (attention.heads, *attention.other_heads.values())
    return {
        shape.hidden_size,
        *map(attention.attended_size_of, heads),
        attention.latent.q_lora_rank or 0 if attention.latent else 0,
        0 if shape.recurrent is None else shape.recurrent.mixer.out_features,
        0 if table is None else table.size,
        shape.dense_width,
        networks.intermediate_size,
        networks.shared_intermediate_size,
    }


def why_too_few(settings: Settings, num_gpus: int) -> str:
    """Return why ranks find no GPU each; empty: they do."""
    need = settings.num_ranks or 1
    if need == 1 or need <= num_gpus:
        return ""
    have = "1 GPU is" if num_gpus == 1 else f"{num_gpus} GPUs are"
    return f"{need} ranks (--ranks) on GPUs need one each, but {have} there, counted from the first one used"


def check_number(settings: Settings, num_gpus: int) -> None:
    """Raise ConfigError if ranks find no GPU each."""
    if reason := why_too_few(settings, num_gpus):
        raise ConfigError(f"{reason}: use fewer (--ranks), or --device cpu")


def check_on_gpu(settings: Settings, shape: ModelConfig) -> None:
    """Raise ConfigError if no GPU, nor a device that computes like one, runs a model with these settings."""
    if refusal := gpu_refusal(settings, shape):
        raise ConfigError(f"{refusal.reason}; {refusal.remedy}")


def check_on_cpu(settings: Settings, why: str) -> None:
    """Raise ConfigError for a setting of GPUs where the CPU computes, and the reason for that."""
    if settings.gpu_memory_bytes is not None:
        raise ConfigError(
            f"--gpu-memory limits a GPU's memory, but the CPU computes: {why}. Remove it, or limit main memory "
            "(--memory)"
        )
    if settings.dtype == "float16":
        raise ConfigError(
            f"--dtype float16 is for GPUs, but the CPU computes: {why}. Use float32, which holds float16 exactly, or "
            "bfloat16"
        )


def why_not_automatic(settings: Settings, shape: ModelConfig, machine: HostResources) -> str:
    """Return why the CPU computes where the user leaves the device open; empty: a GPU does if it is large enough."""
    if machine.accelerator is None:
        return machine.why_no_accelerator
    if machine.why_no_kernels:
        return f"Triton's kernels do not run on {machine.accelerator}: {machine.why_no_kernels}"
    if settings.shares_memory:
        return "models of one server share main memory"
    refusal = gpu_refusal(settings, shape)
    return refusal.reason if refusal else why_too_few(settings, len(machine.accelerators_free_bytes))


def why_too_short(config: EngineConfig, settings: Settings, shape: ModelConfig) -> str:
    """Return why a GPU's memory is too small for requests; empty: it holds a usual one, or as the user set."""
    have, need = config.scheduler.max_model_len, min(shape.max_position, MIN_KV_TOKENS)
    if have >= need or settings.max_model_len is not None or settings.kv_cache_bytes is not None:
        return ""
    return f"beside the model, {config.device} has room for requests of {have} tokens, not of {need}"
