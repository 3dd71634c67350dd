"""Hunyuan-A13B: a shared expert as wide as the others; heads are normalised after positions have rotated them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moeflow.core.attention_config import RopeConfig
from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import check_supported, read_decoder_config
from moeflow.models.layers.attention import Attention, AttentionNames
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.mlp import NetworkNames
from moeflow.models.layers.moe import ExpertNames, MoE
from moeflow.models.layers.shared_network import SharedNames
from moeflow.models.layers.weight_allocator import WeightAllocator

NAMES: Final = ExpertNames(router="gate.wg", shared=SharedNames(NetworkNames(block="mlp.shared_mlp")))
_ATTENTION_NAMES: Final = AttentionNames(q_norm="query_layernorm", k_norm="key_layernorm")
_SUPPORTED: Final = {
    "use_cla": (False,),
    "moe_layer_num_skipped": (0,),
    "use_mixed_mlp_moe": (True,),
    "use_qk_norm": (True,),
}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    check_supported(reader, _SUPPORTED)
    width = reader.positive("intermediate_size")
    for key, expected in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if _alike(reader, key, expected) != expected:
            raise reader.error(f"{key!r} is {truncated_repr(reader.raw[key])}, where {expected} is supported")
    has_bias = reader.get(bool, "attention_bias", False)
    rope: dict[str, Any] = _stretched_rope(reader)
    return read_decoder_config(
        reader,
        model_type="hunyuan_v1_moe",
        num_experts=_alike(reader, "num_experts", None),
        top_k=_alike(reader, "moe_topk", 1),
        shared_intermediate_size=width,
        qkv_bias=has_bias,
        out_bias=has_bias,
        **rope,
    )


def _alike(reader: ConfigReader, key: str, default: int | None) -> int:
    """Return a number that may be listed for each layer. Raises: CheckpointError if layers differ."""
    listed = reader.raw.get(key)
    if not isinstance(listed, list):
        return reader.positive(key) if default is None else reader.positive(key, default)
    if len(set(map(str, listed))) != 1:
        raise reader.error(f"{key!r} is {truncated_repr(listed)}, where all layers have to be alike")
    return ConfigReader({key: listed[0]}, reader.file).positive(key)


def _stretched_rope(reader: ConfigReader) -> dict[str, Any]:
    """Return the field of rotary positions whose base `alpha` stretches, as these models have it; {}: it does not.

    They call it "dynamic", but it is the same for texts of any length.
    """
    raw: Any = reader.raw.get("rope_parameters") or reader.raw.get("rope_scaling") or {}
    if not isinstance(raw, Mapping) or raw.get("rope_type", raw.get("type")) != "dynamic" or not raw.get("alpha"):
        return {}
    rope = ConfigReader(raw, reader.file)
    alpha = rope.number("alpha", least=1.0, most=1e6)
    theta = rope.number("rope_theta", reader.get(float, "rope_theta", 10000.0), least=1.0, most=1e12)
    heads = reader.positive("num_attention_heads")
    dim = reader.positive("head_dim", max(reader.positive("hidden_size") // heads, 1))
    if dim <= 2:
        raise reader.error(f"a head has {dim} dimensions, too few for a stretched base")
    return {"rope": RopeConfig(theta=theta * alpha ** (dim / (dim - 2)))}


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    attention = Attention(config, allocator, layer_idx, qk_norm="per_rotated_head", names=_ATTENTION_NAMES)
    choose = Routing(config.routing.top_k, renormalize=True)
    return DecoderLayer(config, allocator, attention, MoE(config, allocator, choose, NAMES, has_float32_router=True))
