"""Gemma 3 for text: norms before and after each part of a layer; local and global layers, each with own positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from moeflow.core.attention_config import AttentionKind, RopeConfig
from moeflow.core.feed_forward_config import HiddenAct
from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.models.config_keys import read_decoder_config, read_num_layers, read_sliding_layers
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.mlp import dense_mlp
from moeflow.models.layers.moe import expert_kind
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.rope_keys import read_rope_kind

_ACTIVATIONS: Final[Mapping[str, HiddenAct]] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_THETA, _LOCAL_THETA = 1e6, 1e4
_LEAST, _MOST = 1e-3, 1e6  # of scales and caps
# What transformers takes where a config says nothing: those of models that see images, too, are short.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_text_config(reader, "gemma3_text")


def read_text_config(reader: ConfigReader, model_type: str) -> ModelConfig:
    """Return the model's shape. Raises: CheckpointError."""
    reader = ConfigReader({**_DEFAULTS, **reader.raw}, reader.file)
    for key in ("use_bidirectional_attention", "attn_logit_softcapping"):
        if reader.raw.get(key):
            raise reader.error(f"{key!r} is {truncated_repr(reader.raw[key])}, which is not supported")
    has_bias = reader.get(bool, "attention_bias", False)
    max_position = reader.positive("max_position_embeddings")
    ropes = {kind: _read_rope(reader, kind, max_position) for kind in ("full_attention", "sliding_attention")}
    return read_decoder_config(
        reader,
        model_type=model_type,
        rope=ropes["full_attention"],
        layer_kinds=_attention_kinds(reader, ropes),
        qkv_bias=has_bias,
        out_bias=has_bias,
        score_scale=reader.number("query_pre_attn_scalar", 256.0, least=_LEAST, most=_MOST) ** -0.5,
        embedding_scale=math.sqrt(reader.positive("hidden_size")),
        logit_soft_cap=read_soft_cap(reader),
        has_post_norms=True,
        hidden_act=read_activation(reader),
    )


def _read_rope(reader: ConfigReader, kind: str, max_position: int) -> RopeConfig:
    """Return the positions of a kind of layers: `rope_parameters` has an object for each, older configs two bases."""
    is_local = kind == "sliding_attention"
    stated: Any = reader.raw.get("rope_parameters")
    if isinstance(stated, Mapping):
        raw: Any = stated.get(kind) or {}
    else:
        raw = {} if is_local else reader.raw.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise reader.error(f"the rotary settings are {truncated_repr(raw)}, where an object is expected")
    key, default = ("rope_local_base_freq", _LOCAL_THETA) if is_local else ("rope_theta", _THETA)
    rope = ConfigReader(raw, reader.file)
    theta = rope.get(float, "rope_theta", reader.get(float, key, default))
    return read_rope_kind(reader, rope, theta, max_position)


def _attention_kinds(reader: ConfigReader, ropes: Mapping[str, RopeConfig]) -> tuple[AttentionKind, ...]:
    """Return each layer's: where a config does not list them, each sixth sees everything."""
    pattern = reader.positive("sliding_window_pattern", 6)
    are_local = read_sliding_layers(reader) or [(it + 1) % pattern > 0 for it in range(read_num_layers(reader))]
    local = AttentionKind(ropes["sliding_attention"], reader.positive("sliding_window", 4096))
    everything = AttentionKind(ropes["full_attention"], None)
    return tuple(local if is_local else everything for is_local in are_local)


def read_soft_cap(reader: ConfigReader) -> float | None:
    """Return c where logits become c tanh(logit / c); None: they stay. Raises: CheckpointError."""
    if not reader.raw.get("final_logit_softcapping"):
        return None
    return reader.number("final_logit_softcapping", least=_LEAST, most=_MOST)


def read_activation(reader: ConfigReader) -> HiddenAct:
    """Return the networks' function. Raises: CheckpointError."""
    named = reader.get(str, "hidden_activation", "gelu_pytorch_tanh")
    if named not in _ACTIVATIONS:
        raise reader.error(f"'hidden_activation' is {truncated_repr(named)}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[named]


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    attention = Attention(config, allocator, layer_idx, qk_norm="per_head")
    mlp = dense_mlp(allocator, config.hidden_size, config.feed_forward.intermediate_size, expert_kind(config))
    return DecoderLayer(config, allocator, attention, mlp)
