"""Make an engine's configuration of the choices, for this machine and for a described one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import called
from moeflow.core.engine_config import (
    BLOCK_SIZE,
    EngineConfig,
    ExpertSlotsConfig,
    MemoryPlan,
    SchedulerConfig,
    StateSlotsConfig,
)
from moeflow.core.errors import ConfigError
from moeflow.core.hybrid_config import HybridConfig
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import OffloadConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.token_choice import TokenChoice
from moeflow.models.sampling_defaults import read_sampling_defaults
from moeflow.planner.choices.batching_choice import Batching
from moeflow.planner.choices.kv_cache_choice import KVCacheChoice
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.prompt_cache_choice import choose_prompt_cache
from moeflow.planner.choices.served_name import served_name
from moeflow.planner.choices.speculation_choice import SpeculatorChoice
from moeflow.planner.choices.start_choice import choose_importance_file
from moeflow.planner.choices.weight_choice import WeightChoice
from moeflow.settings.settings import GENERATION_CONFIGS, Settings


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions for one engine."""

    device: str
    cpu_isa: str  # empty: torch computes
    dtype: str
    weights: WeightChoice
    num_threads: int
    batching: Batching
    cache: KVCacheChoice
    num_kept_blocks: int | None = None
    shares_prefixes: bool
    states: StateSlotsConfig | None = None
    experts: ExpertSlotsConfig | None = None
    packed_file: str = ""
    parallel: ParallelConfig | None = None
    hybrid: HybridConfig | None = None
    offload: OffloadConfig | None = None
    gpu_memory_bytes: int = 0
    memory: MemoryPlan | None = None
    lossy_top_k: int = 0
    speculators: SpeculatorChoice = SpeculatorChoice()


def engine_config(
    settings: Settings,
    shape: ModelConfig,
    checkpoint: Checkpoint | None,
    choices: Choices,
    reasons: Reasons,
    *,
    model_path: str,
) -> EngineConfig:
    """Return the configuration; `checkpoint` None: there is the model's shape alone.

    Raises: ConfigError, CheckpointError for sampling defaults or a prompt cache.
    """
    weights, cache = choices.weights, choices.cache
    return EngineConfig(
        model_path=model_path,
        model_name=served_name(settings.model_name or called(Path(model_path)), vars(settings)),
        dtype=choices.dtype,
        weight_format=weights.matrices,
        embedding_format=weights.embeddings,
        head_format=weights.head or "",
        layer_table_format=weights.layer_table or "",
        layer_formats=weights.layers,
        mix=weights.mix or "",
        importance_file=choose_importance_file(settings, checkpoint, weights, reasons) if checkpoint else "",
        router_format=weights.routers,
        is_own_precision=weights.is_own,
        is_wide=weights.is_exact,
        cpu_isa=choices.cpu_isa,
        kv_dtype=cache.dtype,
        device=choices.device,
        num_threads=choices.num_threads,
        prompt_cache=choose_prompt_cache(
            settings,
            shape,
            cpu_isa=choices.cpu_isa,
            shares_layers=choices.parallel is not None,
            reasons=reasons,
        ),
        scheduler=SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=cache.num_blocks,
            max_model_len=cache.max_model_len,
            max_num_seqs=choices.batching.max_num_seqs,
            max_num_batched_tokens=choices.batching.max_num_batched_tokens,
            prefix_caching=choices.shares_prefixes,
            num_kept_blocks=choices.num_kept_blocks,
            states=choices.states,
        ),
        kv_cache_bytes=cache.num_bytes,
        experts=choices.experts,
        capacity_factor=settings.capacity_factor or 0.0,
        lossy_top_k=choices.lossy_top_k,
        packed_file=choices.packed_file,
        parallel=choices.parallel,
        hybrid=choices.hybrid,
        offload=choices.offload,
        gpu_memory_bytes=choices.gpu_memory_bytes,
        memory=choices.memory,
        speculators=choices.speculators.names,
        draft_models=choices.speculators.draft_models,
        sampling_defaults=_sampling_defaults(settings, checkpoint),
        record_routing=_absolute(settings.record_routing),
        graph_file=_absolute(settings.graph_file),
        trace_file=_absolute(settings.trace_file),
    )


def _sampling_defaults(settings: Settings, checkpoint: Checkpoint | None) -> TokenChoice:
    """Return the sampling defaults of requests: the engine's own, or those in the model's files."""
    name = settings.generation_config
    if name not in GENERATION_CONFIGS:
        raise ConfigError(f"generation_config is {name!r}; use one of {', '.join(GENERATION_CONFIGS)}")
    return TokenChoice() if name == "none" or checkpoint is None else read_sampling_defaults(checkpoint)


def _absolute(file: Path | None) -> str:
    return "" if file is None else str(file.absolute())
