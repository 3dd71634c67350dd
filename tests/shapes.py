"""Models that exist only as numbers: their shapes, an engine's configuration for one, the engine's description of one.

Tests change the fields under test with `replace`.
"""

from __future__ import annotations

from moeflow.core.attention_config import RopeConfig
from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.engine_messages import ModelInfo
from moeflow.core.model_config import ModelConfig

MIXTRAL = ModelConfig.from_fields(  # 8x7B, as published
    model_type="mixtral",
    vocab_size=32000,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_position=32768,
    eps=1e-5,
    rope=RopeConfig(theta=1e6),
    num_experts=8,
    top_k=2,
)
TINY = MIXTRAL.with_fields(
    vocab_size=1000,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=256,
    max_position=4096,
    rope=RopeConfig(),
)
ENGINE = EngineConfig(
    model_path="fake",
    model_name="fake",
    dtype="float32",
    weight_format="float32",
    embedding_format="float32",
    cpu_isa="",
    kv_dtype="float32",
    device="cpu",
    num_threads=1,
    scheduler=SchedulerConfig(num_blocks=64, max_model_len=1024),
    kv_cache_bytes=0,
)
INFO = ModelInfo(
    name="fake",
    path="/fake",
    model_type="fake",
    vocab_size=400,
    max_model_len=64,
    max_num_seqs=8,
    eos_token_ids=(0,),
    num_layers=1,
    hidden_size=4,
    num_experts=4,
    top_k=2,
    num_parameters=1000,
    num_active_parameters=500,
    weight_format="float32",
    device="cpu",
    kv_capacity_tokens=1024,
    created=1_700_000_000,
)
