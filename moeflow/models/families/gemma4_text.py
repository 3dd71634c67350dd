"""Gemma 4 for text: local layers, and global ones with wider heads, whose keys are their values, too.

Experts are beside a network that all tokens go to. In models for phones, the last layers attend to keys and values of
earlier ones and have wider networks. Tokens are embedded separately for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from moeflow.core.attention_config import AttentionKind, HeadSizes, RopeConfig
from moeflow.core.embedding_config import LayerEmbeddings
from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config, read_num_layers, read_sliding_layers
from moeflow.models.families.gemma3_text import read_activation, read_soft_cap
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.layer_embeddings import LayerInput
from moeflow.models.layers.mlp import NAMES as NETWORK_NAMES
from moeflow.models.layers.mlp import dense_mlp
from moeflow.models.layers.moe import ExpertNames, expert_kind
from moeflow.models.layers.normed_experts import NormedExperts
from moeflow.models.layers.normed_values import NormedValues
from moeflow.models.layers.shared_network import SharedNames
from moeflow.models.layers.weight_allocator import WeightAllocator

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_KEY_PARTS: Final = ("k_proj", "v_proj", "k_norm")
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
    "vocab_size_per_layer_input": 262_144,
}
_ROPES: Final[Mapping[str, Mapping[str, Any]]] = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_MAX_THETA, _MAX_FACTOR = 1e15, 1e6


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_text_config(reader, "gemma4_text")


def read_text_config(reader: ConfigReader, model_type: str) -> ModelConfig:
    """Return the model's shape. Raises: CheckpointError."""
    reader = ConfigReader({**_DEFAULTS, **reader.raw}, reader.file)
    if reader.raw.get("use_bidirectional_attention") not in (None, "vision"):  # which is about images' tokens
        raise reader.error("'use_bidirectional_attention' is not null or 'vision', which alone are supported")
    kinds = _attention_kinds(reader)
    has_bias = reader.get(bool, "attention_bias", False)
    has_experts = reader.get(bool, "enable_moe_block", False)
    shared = [layer for layer, kind in enumerate(kinds) if kind.heads is not None and not kind.heads.has_keys]
    return read_decoder_config(
        reader,
        model_type=model_type,
        rope=kinds[0].rope,
        layer_kinds=kinds,
        qkv_bias=has_bias,
        out_bias=has_bias,
        score_scale=1.0,
        embedding_scale=math.sqrt(reader.positive("hidden_size")),
        logit_soft_cap=read_soft_cap(reader),
        has_value_norms=True,
        has_post_norms=True,
        has_layer_scales=True,
        hidden_act=read_activation(reader),
        # Files may have what makes keys and values in layers that take others'.
        unused_prefixes=tuple(f"model.layers.{layer}.self_attn.{part}" for layer in shared for part in _KEY_PARTS),
        wide_layers=tuple(shared) if reader.get(bool, "use_double_wide_mlp", False) else (),
        layer_embeddings=_read_layer_embeddings(reader),
        **(_read_experts(reader) if has_experts else {}),
    )


def _read_layer_embeddings(reader: ConfigReader) -> LayerEmbeddings | None:
    size = reader.get(int, "hidden_size_per_layer_input")
    if size == 0:
        return None
    vocab_size = reader.positive("vocab_size_per_layer_input")
    if vocab_size < reader.positive("vocab_size"):
        raise reader.error(f"tokens are embedded for each layer, but only {vocab_size}: fewer than there are")
    return LayerEmbeddings(reader.positive("hidden_size_per_layer_input"), vocab_size)


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    for key in ("hidden_size_per_layer_input", "use_double_wide_mlp"):
        if reader.raw.get(key):
            raise reader.error(f"{key!r} is {truncated_repr(reader.raw[key])}: not supported beside experts")
    return {
        "num_experts": reader.positive("num_experts"),
        "top_k": reader.positive("top_k_experts"),
        "intermediate_size": reader.positive("moe_intermediate_size"),
        "shared_intermediate_size": reader.positive("intermediate_size"),
        "has_norms_of_experts": True,
    }


def _attention_kinds(reader: ConfigReader) -> tuple[AttentionKind, ...]:
    """Return each layer's kind; the last one is always global."""
    num_layers = read_num_layers(reader)
    are_local = list(read_sliding_layers(reader) or ((it + 1) % _INTERVAL > 0 for it in range(num_layers)))
    are_local[-1] = False
    window, kv_layers = reader.positive("sliding_window", 512), _kv_layers(reader, are_local)
    kinds = []
    for layer_idx, is_local in enumerate(are_local):
        heads = replace(_read_heads(reader, layer_idx, is_local=is_local), kv_layer=kv_layers[layer_idx])
        source = heads if heads.kv_layer is None else _read_heads(reader, heads.kv_layer, is_local=is_local)
        if (source.num_kv_heads, source.head_dim) != (heads.num_kv_heads, heads.head_dim):
            raise reader.error(f"layer {layer_idx} attends to keys of layer {heads.kv_layer}, whose heads are others")
        rope = _read_rope(reader, _LOCAL if is_local else _GLOBAL, heads.head_dim)
        kinds.append(AttentionKind(rope, window if is_local else None, heads))
    return tuple(kinds)


def _kv_layers(reader: ConfigReader, are_local: Sequence[bool]) -> list[int | None]:
    """Return the layer whose keys and values each attends to: the last of its kind that has some; None: its own."""
    num_shared = reader.get(int, "num_kv_shared_layers", 0)
    num_own = len(are_local) - num_shared
    last = {is_local: layer for layer, is_local in enumerate(are_local[: max(num_own, 0)])}
    if num_shared < 0 or (num_shared and set(are_local) != last.keys()):
        raise reader.error(
            f"'num_kv_shared_layers' is {num_shared}, of {len(are_local)} layers: before those that share there is "
            "none of each kind"
        )
    return [None if layer < num_own else last[is_local] for layer, is_local in enumerate(are_local)]


def _read_heads(reader: ConfigReader, layer_idx: int, *, is_local: bool) -> HeadSizes:
    """Return a layer's heads: newer files of transformers list each layer's differences, older ones those of a kind."""
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
        raise reader.error(f"what it says of layer {layer_idx} is {truncated_repr(own)}, where heads alone may differ")
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
        raise reader.error(f"the rotary settings of {kind} are {truncated_repr(raw)}, where an object is expected")
    rope = ConfigReader(raw, reader.file)
    theta, named = rope.number("rope_theta", least=1.0, most=_MAX_THETA), rope.get(str, "rope_type", "default")
    if named == "default":
        return RopeConfig(theta, rotary_dim=head_dim)
    if named != "proportional":
        raise reader.error(
            f"rotary positions are of the kind {truncated_repr(named)}; supported are default, proportional"
        )
    share = rope.number("partial_rotary_factor", 1.0, least=0.0, most=1.0)
    factor = rope.number("factor", 1.0, least=1.0, most=_MAX_FACTOR)
    turning = 2 * int(share * head_dim // 2)
    return RopeConfig(theta, "proportional", factor, rotary_dim=head_dim, turning_dim=turning)


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    attention = NormedValues(config, allocator, layer_idx)
    if config.routing.num_experts:
        choose = Routing(config.routing.top_k, renormalize=True)
        return DecoderLayer(config, allocator, attention, NormedExperts(config, allocator, choose, _NAMES))
    mlp = dense_mlp(allocator, config.hidden_size, config.dense_width_of(layer_idx), expert_kind(config))
    sizes = config.embeddings.layer_embeddings
    layer_input = None if sizes is None else LayerInput(config, sizes, allocator, layer_idx)
    return DecoderLayer(config, allocator, attention, mlp, layer_input=layer_input)
