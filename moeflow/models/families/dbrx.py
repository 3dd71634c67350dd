"""DBRX: layer norms without biases; queries, keys and values are clipped; sixteen experts, four for each token.

Its checkpoints stack matrices; loading gives each a name (`checkpoint/renamed/dbrx.py`).
"""

from __future__ import annotations

from typing import Any, Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.moe import ExpertNames, MoE
from moeflow.models.layers.weight_allocator import WeightAllocator

_EPS: Final = 1e-5  # of PyTorch's layer norms, which the config does not mention
# What the keys that all families share are called here.
_KEYS: Final = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}
NAMES = ExpertNames()


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    attention, ffn = _section(reader, "attn_config"), _section(reader, "ffn_config")
    clip = attention.get(float, "clip_qkv", None)
    if clip is not None and clip <= 0:
        raise reader.error(f"'clip_qkv' is {clip}, where a positive number is expected")
    power = ffn.raw.get("moe_normalize_expert_weights", 1.0)
    if power not in (None, 1):
        raise reader.error(f"'moe_normalize_expert_weights' is {truncated_repr(power)}, where 1 or null is supported")
    if reader.get(bool, "tie_word_embeddings", False):
        raise reader.error("'tie_word_embeddings' is true, where only false is supported")
    return read_decoder_config(
        _in_common_keys(reader, attention, ffn),
        model_type="dbrx",
        num_experts=ffn.positive("moe_num_experts"),
        top_k=ffn.positive("moe_top_k"),
        norm_topk_prob=power is not None,
        clip_qkv=clip,
        has_layer_norms=True,
    )


def _section(reader: ConfigReader, key: str) -> ConfigReader:
    value = reader.raw.get(key)
    if not isinstance(value, dict):
        raise reader.error(f"{key!r} is {truncated_repr(value)}, where an object is expected")
    return ConfigReader(value, reader.file)


def _in_common_keys(reader: ConfigReader, attention: ConfigReader, ffn: ConfigReader) -> ConfigReader:
    """Return the config in the keys that families share; old files have `rope_theta` among those of attention."""
    activation: Any = ffn.raw.get("ffn_act_fn") or {}
    raw = dict(reader.raw) | {key: reader.positive(own) for key, own in _KEYS.items()}
    raw |= {
        "num_key_value_heads": attention.positive("kv_n_heads"),
        "intermediate_size": ffn.positive("ffn_hidden_size"),
        "rms_norm_eps": _EPS,
        "hidden_act": activation.get("name") if isinstance(activation, dict) else activation,
    }
    if "rope_theta" in attention.raw and not reader.raw.get("rope_parameters"):
        raw["rope_theta"] = attention.raw["rope_theta"]
    return ConfigReader(raw, reader.file)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    choose = Routing(config.routing.top_k, renormalize=config.routing.norm_topk_prob)
    return DecoderLayer(
        config, allocator, Attention(config, allocator, layer_idx), MoE(config, allocator, choose, NAMES)
    )
