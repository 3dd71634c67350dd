"""The common part of `config.json` for decoders made from another model."""

from __future__ import annotations

from typing import Any, Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.model_config import ModelConfig

_CARRIED_KEYS: Final = ("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")


def decoder_config(source: Checkpoint, shape: ModelConfig) -> dict[str, Any]:
    """Return all sizes, and special tokens and rotary embedding of `source`."""
    config = source.config
    if config.get("rope_parameters"):
        rope: dict[str, Any] = {
            "rope_parameters": {**config["rope_parameters"], "rope_theta": shape.attention.rotary.theta}
        }
    else:
        rope = {"rope_theta": shape.attention.rotary.theta, "rope_scaling": config.get("rope_scaling")}
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.feed_forward.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.attention.num_heads,
        "num_key_value_heads": shape.attention.num_kv_heads,
        "head_dim": shape.attention.head_dim,
        "max_position_embeddings": shape.max_position,
        "hidden_act": shape.feed_forward.hidden_act,
        "rms_norm_eps": shape.norms.eps,
        "tie_word_embeddings": shape.embeddings.tie_word_embeddings,
        **rope,
        **{key: config[key] for key in _CARRIED_KEYS if config.get(key) is not None},
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": "bfloat16",
    }
