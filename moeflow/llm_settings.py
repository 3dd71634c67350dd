"""The settings of `LLM(model, **settings)` as type checkers see them: names and types, without defaults or meaning.

Each is a field of `Settings` that users may set, which has its meaning, in the types that
`settings.values` reads: a number may be text, a size "64MiB", a folder text, a format torch's own.
"""

from __future__ import annotations

import os
from typing import TypedDict

from moeflow.kernels.on_demand import torch


class FlagSettings(TypedDict, total=False):
    """Settings whose options on the command line have other names: `memory` is `--memory`, and `memory_bytes`."""

    packed_weights: str | os.PathLike[str] | None
    memory: int | str | None
    kv_cache: int | str | None
    prompt_cache_size: int | str | None
    threads: int | str | None
    gpu_memory: int | str | None
    ranks: int | str | None
    redundant_experts: int | str | None
    replicas: int | str | None
    target_first_token: float | str | None
    speculator: str | list[str] | tuple[str, ...]
    trace: str | os.PathLike[str] | None
    graph: str | os.PathLike[str] | None


class LLMSettings(FlagSettings, total=False):
    """Keyword arguments of `LLM`. The engine chooses omitted and None values for this machine."""

    model_name: str | None
    dtype: str | torch.dtype
    quantize: str | None
    exact_activations: bool
    packed_weights_file: str | os.PathLike[str] | None
    memory_bytes: int | str | None
    kv_cache_bytes: int | str | None
    kv_dtype: str | torch.dtype
    max_model_len: int | str | None
    max_num_seqs: int | str | None
    max_num_batched_tokens: int | str | None
    prefix_caching: bool
    prompt_cache: str | os.PathLike[str] | None
    prompt_cache_bytes: int | str | None
    num_threads: int | str | None
    device: str | torch.device
    gpu_memory_bytes: int | str | None
    pipeline: str | None
    micro_batch: int | str | None
    prompt_micro_batch: int | str | None
    hosted_experts: float | str | None
    resident_experts: float | str | None
    resident_kv: float | str | None
    num_ranks: int | str | None
    stages: str | None
    expert_placement: str
    num_redundant_experts: int | str | None
    expert_layout: str
    attention_layout: str
    rank_schedule: str
    num_replicas: int | str | None
    max_replicas: int | str | None
    target_first_token_s: float | str | None
    listen_ranks: str | None
    cluster_token_file: str | os.PathLike[str] | None
    ray_address: str | None
    ray_placement: str
    remote_experts: str | None
    expert_policy: str
    predictor: str
    capacity_factor: float | str | None
    lossy_routing: str | None
    speculators: str | list[str] | tuple[str, ...]
    generation_config: str
    record_routing: str | os.PathLike[str] | None
    trace_file: str | os.PathLike[str] | None
    graph_file: str | os.PathLike[str] | None
    cpu_isa: str
    cache_dir: str | os.PathLike[str] | None
