"""Gemma 4 for text: local layers, and global ones with wider heads, whose keys are their values, too.

Experts are beside a network that all tokens go to. Models for phones, whose last layers share keys and values with
earlier ones and which embed tokens in each layer anew, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from moeflow.core.brief import brief
from moeflow.core.model_config import AttentionKind, ConfigReader, HeadSizes, ModelConfig, RopeConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config, read_num_layers, read_sliding_layers
from moeflow.models.gemma3_text import read_activation, read_soft_cap
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.mlp import NAMES as NETWORK_NAMES
from moeflow.models.layers.mlp import dense_mlp
from moeflow.models.layers.moe import ExpertNames, expert_kind
from moeflow.models.layers.normed_experts import NormedExperts
from moeflow.models.layers.normed_values import NormedValues
from moeflow.models.layers.shared_network import SharedNames
from moeflow.models.layers.weight_allocator import WeightAllocator

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_INTERVAL: Final = 6  # of global layers, where a config does not list them
_NAMES: Final = ExpertNames(block="moe", router="router.proj", shared=SharedNames(NETWORK_NAMES))
# What transformers takes where a config says nothing.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
}
_ROPES: Final[Mapping[str, Mapping[str, Any]]] = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
# What is not computed, and why.
_REFUSED: Final = {
    "hidden_size_per_layer_input": "layers that embed tokens anew are",
    "num_kv_shared_layers": "layers that share keys and values are",
}
_MAX_THETA, _MAX_FACTOR = 1e15, 1e6


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_text_config(reader, "gemma4_text")


def read_text_config(reader: ConfigReader, model_type: str) -> ModelConfig:
    """Return the model's shape. Raises: CheckpointError."""
    reader = ConfigReader({**_DEFAULTS, **reader.raw}, reader.file)
    for key, what in _REFUSED.items():
        if reader.raw.get(key):
            raise reader.error(f"{key!r} is {brief(reader.raw[key])}: {what} not supported")
    if reader.raw.get("use_bidirectional_attention") not in (None, "vision"):  # which is about images' tokens
        raise reader.error("'use_bidirectional_attention' is not null or 'vision', which alone are supported")
    kinds = _attention_kinds(reader)
    has_bias = reader.get(bool, "attention_bias", False)
    return read_decoder_config(
        reader,
        model_type=model_type,
        rope=kinds[0].rope,
        attention_kinds=kinds,
        attention_bias=has_bias,
        attention_out_bias=has_bias,
        attention_scale=1.0,
        embedding_scale=math.sqrt(reader.positive("hidden_size")),
        logit_soft_cap=read_soft_cap(reader),
        has_value_norms=True,
        has_post_norms=True,
        has_layer_scales=True,
        hidden_act=read_activation(reader),
        **(_read_experts(reader) if reader.get(bool, "enable_moe_block", False) else {}),
    )


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    return {
        "num_experts": reader.positive("num_experts"),
        "top_k": reader.positive("top_k_experts"),
        "intermediate_size": reader.positive("moe_intermediate_size"),
        "shared_intermediate_size": reader.positive("intermediate_size"),
        "has_norms_of_experts": True,
    }


def _attention_kinds(reader: ConfigReader) -> tuple[AttentionKind, ...]:
    """Return each layer's; the last one is global, whatever is said of it."""
    num_layers = read_num_layers(reader)
    are_local = list(read_sliding_layers(reader) or ((it + 1) % _INTERVAL > 0 for it in range(num_layers)))
    are_local[-1] = False
    window = reader.positive("sliding_window", 512)
    kinds = []
    for layer_idx, is_local in enumerate(are_local):
        heads = _read_heads(reader, layer_idx, is_local=is_local)
        rope = _read_rope(reader, _LOCAL if is_local else _GLOBAL, heads.head_dim)
        kinds.append(AttentionKind(rope, window if is_local else None, heads))
    return tuple(kinds)


def _read_heads(reader: ConfigReader, layer_idx: int, *, is_local: bool) -> HeadSizes:
    """Return a layer's heads: newer files of transformers say of each layer in which it differs, older of the kind."""
    stated: Any = reader.raw.get("per_layer_config")
    values_are_keys = reader.get(bool, "attention_k_eq_v", False) and not is_local
    own: Any = {}
    if isinstance(stated, Mapping):
        own = stated.get(str(layer_idx)) or {}
    elif stated is None and not is_local:
        own = {"head_dim": reader.positive("global_head_dim", 512)}
        if values_are_keys and reader.raw.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = reader.positive("num_global_key_value_heads")
    if not isinstance(own, Mapping) or set(own) - {"head_dim", "num_key_value_heads"}:
        raise reader.error(f"what it says of layer {layer_idx} is {brief(own)}, where heads alone may differ")
    layer = ConfigReader({**reader.raw, **own}, reader.file)
    num_heads, num_kv_heads = reader.positive("num_attention_heads"), layer.positive("num_key_value_heads")
    head_dim = layer.positive("head_dim")
    if num_heads % num_kv_heads or head_dim % 2:
        raise reader.error(
            f"layer {layer_idx} has {num_heads} heads of queries, {num_kv_heads} of keys, {head_dim} dimensions wide: "
            "that is no even number, or not as many queries for each key"
        )
    return HeadSizes(num_kv_heads, head_dim, values_are_keys)


def _read_rope(reader: ConfigReader, kind: str, head_dim: int) -> RopeConfig:
    """Return the positions of a kind of layers: in proportional ones the first pairs alone turn with the position."""
    stated: Any = reader.raw.get("rope_parameters") or _ROPES
    raw: Any = stated.get(kind) if isinstance(stated, Mapping) else None
    if not isinstance(raw, Mapping):
        raise reader.error(f"the rotary settings of {kind} are {brief(raw)}, where an object is expected")
    rope = ConfigReader(raw, reader.file)
    theta, named = rope.number("rope_theta", least=1.0, most=_MAX_THETA), rope.get(str, "rope_type", "default")
    if named == "default":
        return RopeConfig(theta, rotary_dim=head_dim)
    if named != "proportional":
        raise reader.error(f"rotary positions are of the kind {brief(named)}; supported are default, proportional")
    share = rope.number("partial_rotary_factor", 1.0, least=0.0, most=1.0)
    factor = rope.number("factor", 1.0, least=1.0, most=_MAX_FACTOR)
    turning = 2 * int(share * head_dim // 2)
    return RopeConfig(theta, "proportional", factor, rotary_dim=head_dim, turning_dim=turning)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    attention = NormedValues(config, allocator, layer_idx)
    if config.num_experts:
        choose = Routing(config.top_k, renormalize=True)
        return DecoderLayer(config, allocator, attention, NormedExperts(config, allocator, choose, _NAMES))
    mlp = dense_mlp(allocator, config.hidden_size, config.intermediate_size, expert_kind(config))
    return DecoderLayer(config, allocator, attention, mlp)
