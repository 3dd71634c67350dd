"""Granite 4.0: most layers are Mamba2's, the others attend, mostly without positions; Granite's multipliers.

Each layer has experts beside a shared one; or this one alone, in models without experts.
"""

from __future__ import annotations

import math
from typing import Final

from moeflow.core.model_config import MOST, ConfigReader, ModelConfig
from moeflow.core.recurrent_config import MAX_KEY_DIM, MAX_TAPS, Mamba2Config, RecurrentConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.models.config_keys import MIN_EPS, read_layer_types, read_num_layers
from moeflow.models.families.granitemoe import SHARED, make_experts, read_granite_config
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer, LayerNames
from moeflow.models.layers.mlp import dense_mlp
from moeflow.models.layers.recurrent.mamba2 import Mamba2
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.routed_keys import count

_KINDS: Final = {"full_attention": False, "attention": False, "linear_attention": True, "mamba": True}
_MAMBA: Final = LayerNames(mixer="mamba")


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    width = reader.positive("shared_intermediate_size", 1024)
    num_experts = count(reader, "num_local_experts", 8)
    return read_granite_config(
        reader,
        "granitemoehybrid",
        num_experts=num_experts,
        recurrent=_read_recurrent(reader),
        **{"shared_intermediate_size" if num_experts else "intermediate_size": width},
        **({} if _has_positions(reader) else {"rope": None}),
    )


def _has_positions(reader: ConfigReader) -> bool:
    kind = reader.get(str, "position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise reader.error(f"'position_embedding_type' is {truncated_repr(kind)}, where 'rope' or 'nope' is expected")
    return kind == "rope"


def _read_recurrent(reader: ConfigReader) -> RecurrentConfig | None:
    key = "layer_types" if reader.raw.get("layer_types") is not None else "layers_block_type"
    is_mamba = read_layer_types(reader, _KINDS, key) or (True,) * read_num_layers(reader)
    layers = tuple(layer_idx for layer_idx, mamba in enumerate(is_mamba) if mamba)
    return RecurrentConfig(layers, _read_mamba(reader)) if layers else None


def _read_mamba(reader: ConfigReader) -> Mamba2Config:
    """Read what a layer without attention is made of."""
    num_values = reader.positive("mamba_expand", 2) * reader.positive("hidden_size")
    num_heads = reader.positive("mamba_n_heads", 128)
    is_auto = reader.raw.get("mamba_d_head", "auto") == "auto"
    head_dim = num_values // num_heads if is_auto else reader.positive("mamba_d_head")
    if num_heads * head_dim != num_values:
        raise reader.error(
            f"'mamba_n_heads' are {num_heads}, of {head_dim} dimensions each, where together they have to have "
            f"'mamba_expand' times 'hidden_size', {num_values}"
        )
    num_groups = reader.positive("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise reader.error(f"'mamba_n_heads' is {num_heads}, no multiple of 'mamba_n_groups', {num_groups}")
    least_step, most_step = _read_step_limits(reader)
    return Mamba2Config(
        num_heads=num_heads,
        num_groups=num_groups,
        state_dim=reader.positive("mamba_d_state", 256, most=MAX_KEY_DIM),
        head_dim=head_dim,
        kernel_size=reader.positive("mamba_d_conv", 4, most=MAX_TAPS),
        norm_eps=reader.number("rms_norm_eps", least=MIN_EPS, most=1.0),
        has_conv_bias=reader.get(bool, "mamba_conv_bias", True),
        has_bias=reader.get(bool, "mamba_proj_bias", False),
        least_step=least_step,
        most_step=most_step,
    )


def _read_step_limits(reader: ConfigReader) -> tuple[float, float]:
    """Return between what steps are; transformers writes infinity in a way of its own."""
    stored = reader.raw.get("time_step_limit")
    if stored is None:
        return 0.0, math.inf
    limits = [math.inf if it == {"__float__": "Infinity"} else it for it in stored] if isinstance(stored, list) else []
    are_numbers = all(type(it) in (int, float) and (0 <= it <= MOST or it == math.inf) for it in limits)
    if len(limits) != 2 or not are_numbers or not limits[0] <= limits[1] or limits[0] == math.inf:
        raise reader.error(f"'time_step_limit' is {truncated_repr(stored)}, where two ascending numbers are expected")
    return float(limits[0]), float(limits[1])


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    mlp = (
        make_experts(config, allocator)
        if config.routing.num_experts
        else dense_mlp(allocator, config.hidden_size, config.feed_forward.intermediate_size, names=SHARED)
    )
    if config.recurrent is None or layer_idx not in config.recurrent.layers:
        return DecoderLayer(config, allocator, Attention(config, allocator, layer_idx), mlp)
    assert isinstance(config.recurrent.mixer, Mamba2Config)
    mamba = Mamba2(config, allocator, layer_idx, config.recurrent.mixer)
    return DecoderLayer(config, allocator, mamba, mlp, _MAMBA)
