"""A plan, and what one is made for."""

from __future__ import annotations

from pathlib import Path

from moeflow.core.plan import RESIDENT, Estimate, Plan, Policy, TierUse, Workload

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
PLAN = Plan(
    model=MODEL,
    machine="this machine",
    goal="throughput",
    workload=Workload(prompt_len=20, gen_len=10, max_prompt_len=30),
    weight_format="int8",
    embedding_format="int8",
    kv_dtype="bfloat16",
    policy=Policy(batch_size=6, micro_batch=6, attention_on_device=False, ffn_on_device=False, chunk_tokens=128),
    pipeline=RESIDENT,
    kv_cache_bytes=1 << 20,
    memory_bytes=0,
    prefill_tokens_per_s=ONE,
    decode_tokens_per_s=ONE,
    tokens_per_s=ONE,
    time_to_first_token_s=ONE,
    time_per_token_s=ONE,
    memory=(TierUse(tier="ram", peak_bytes=ONE, capacity_bytes=1 << 30),),
    bottleneck="reading from RAM",
    busy=(("host", 1.0),),
    num_threads=3,
)
