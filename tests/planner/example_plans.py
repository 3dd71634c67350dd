"""A plan, and what one is made for."""

from __future__ import annotations

from pathlib import Path

from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.plan import Estimate, Forecast, Plan, Policy, TierUse, Workload

CONFIG = {
    "model_type": "mixtral",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


ONE = Estimate(1.0, 0.5, 2.0)
MODEL = str(Path("/models/tiny"))
ENGINE_CONFIG = EngineConfig(
    model_path=MODEL,
    model_name="tiny",
    dtype="float32",
    weight_format="int8",
    embedding_format="int8",
    cpu_isa="",
    kv_dtype="bfloat16",
    device="cpu",
    num_threads=3,
    scheduler=SchedulerConfig(num_blocks=18, max_model_len=40, max_num_seqs=6, max_num_batched_tokens=128),
    kv_cache_bytes=1 << 20,
)
FORECAST = Forecast(
    policy=Policy(batch_size=6, micro_batch=6, attention_on_device=False, ffn_on_device=False, chunk_tokens=128),
    prefill_tokens_per_s=ONE,
    decode_tokens_per_s=ONE,
    decode_alone_tokens_per_s=ONE,
    tokens_per_s=ONE,
    time_to_first_token_s=ONE,
    all_prompts_s=ONE,
    time_per_token_s=ONE,
    memory=(TierUse(tier="ram", peak_bytes=ONE, capacity_bytes=1 << 30),),
    bottleneck="reading from RAM",
    busy=(("host", 1.0),),
)
PLAN = Plan(
    config=ENGINE_CONFIG,
    settings={"model": MODEL, "quantize": "int8", "num_threads": 3},
    goal="throughput",
    workload=Workload(prompt_len=20, gen_len=10, max_prompt_len=30),
    machine="this machine",
    forecast=FORECAST,
)
