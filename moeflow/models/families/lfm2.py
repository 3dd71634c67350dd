"""LFM2: most layers are short convolutions, the others attend; dense."""

from __future__ import annotations

from typing import Any, Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.core.recurrent_config import MAX_TAPS, RecurrentConfig, ShortConvConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.models.config_keys import read_decoder_config, read_layer_types, read_num_layers
from moeflow.models.layers.attention import Attention, AttentionNames
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer, LayerNames
from moeflow.models.layers.mlp import NetworkNames, dense_mlp
from moeflow.models.layers.recurrent.short_conv import ShortConv
from moeflow.models.layers.token_mixer import TokenMixer
from moeflow.models.layers.weight_allocator import WeightAllocator

ATTENTION: Final = LayerNames(input_norm="operator_norm", post_norm="ffn_norm")
CONV: Final = LayerNames(mixer="conv", input_norm="operator_norm", post_norm="ffn_norm")
NETWORK: Final = NetworkNames("feed_forward", ups=("w1", "w3"), down="w2")
LAST_NORM: Final = "model.embedding_norm"
_ATTENTION_NAMES: Final = AttentionNames(out="out_proj", q_norm="q_layernorm", k_norm="k_layernorm")
_KINDS: Final = {"full_attention": False, "conv": True}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_lfm2_config(reader, model_type="lfm2", intermediate_size=_intermediate_size(reader))


def read_lfm2_config(reader: ConfigReader, *, model_type: str, **family: Any) -> ModelConfig:
    """Return the shape of a model of LFM2's layers; `family` is as `read_decoder_config` has it.

    Raises: CheckpointError.
    """
    tie_key = "tie_embedding" if "tie_embedding" in reader.raw else "tie_word_embeddings"
    return read_decoder_config(
        reader,
        model_type=model_type,
        default_theta=1e6,
        eps_key="norm_eps",
        recurrent=_read_recurrent(reader),
        tie_word_embeddings=reader.get(bool, tie_key, True),
        **family,
    )


def _read_recurrent(reader: ConfigReader) -> RecurrentConfig | None:
    is_conv = read_layer_types(reader, _KINDS) or _attends_where_listed(reader)
    layers = tuple(layer_idx for layer_idx, conv in enumerate(is_conv) if conv)
    mixer = ShortConvConfig(
        num_channels=reader.positive("hidden_size"),
        kernel_size=reader.positive("conv_L_cache", 3, most=MAX_TAPS),
        has_bias=reader.get(bool, "conv_bias", False),
    )
    return RecurrentConfig(layers, mixer) if layers else None


def _attends_where_listed(reader: ConfigReader) -> tuple[bool, ...]:
    """Return of each layer whether it is a convolution, from the key that came before `layer_types`."""
    listed = reader.raw.get("full_attn_idxs")
    if not isinstance(listed, list) or not all(isinstance(layer_idx, int) for layer_idx in listed):
        raise reader.error(f"'full_attn_idxs' is {truncated_repr(listed)}, where a list of layer numbers is expected")
    return tuple(layer_idx not in listed for layer_idx in range(read_num_layers(reader)))


def _intermediate_size(reader: ConfigReader) -> int:
    """Return the width of the dense networks, which is adjusted from what the config says unless it says not to."""
    size = reader.positive("block_ff_dim" if "block_ff_dim" in reader.raw else "intermediate_size")
    if not reader.get(bool, "block_auto_adjust_ff_dim", True):
        return size
    multiple = reader.positive("block_multiple_of", 256)
    factor = reader.number("block_ffn_dim_multiplier", 1.0, least=1e-3, most=1e3)
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer, last_norm=LAST_NORM)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    mixer, names = make_mixer(config, allocator, layer_idx)
    mlp = dense_mlp(allocator, config.hidden_size, config.feed_forward.intermediate_size, names=NETWORK)
    return DecoderLayer(config, allocator, mixer, mlp, names)


def make_mixer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> tuple[TokenMixer, LayerNames]:
    """Return what mixes the tokens in a layer, and how checkpoints name the layer's parts."""
    if config.recurrent is not None and layer_idx in config.recurrent.layers:
        assert isinstance(config.recurrent.mixer, ShortConvConfig)
        return ShortConv(config, allocator, layer_idx, config.recurrent.mixer), CONV
    return Attention(config, allocator, layer_idx, qk_norm="per_head", names=_ATTENTION_NAMES), ATTENTION
