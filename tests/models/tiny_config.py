"""A configuration of a tiny model."""

from __future__ import annotations

CONFIG = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
