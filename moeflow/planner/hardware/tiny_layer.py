"""A layer whose kernels have next to nothing to do, for measuring the other costs."""

from __future__ import annotations

from moeflow.core.attention_config import RopeConfig
from moeflow.core.model_config import ModelConfig


def tiny_shape(*, num_experts: int, top_k: int, num_kv_heads: int = 1) -> ModelConfig:
    """Return the shape of a model of one such layer."""
    return ModelConfig.from_fields(
        model_type="qwen3_moe",
        vocab_size=64,
        hidden_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        intermediate_size=32,
        max_position=4096,
        eps=1e-6,
        rope=RopeConfig(),
        num_experts=num_experts,
        top_k=top_k,
    )
