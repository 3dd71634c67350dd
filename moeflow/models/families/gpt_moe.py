"""GPT with experts in every other layer: layer norms, biases, learned positions, networks of two matrices.

As Megatron trains it (`checkpoint/megatron/`) and FasterTransformer has it on disk (`checkpoint/faster_transformer/`).
One expert of a token weighs its share under a softmax over all; the shares of several are divided by their sum.
"""

from __future__ import annotations

from typing import Final

from moeflow.core.embedding_config import AddedPositions
from moeflow.core.feed_forward_config import HiddenAct
from moeflow.core.model_config import MAX_LAYERS, ConfigReader, ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import MIN_EPS
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.feed_forward import feed_forward
from moeflow.models.layers.mlp import NetworkNames
from moeflow.models.layers.moe import ExpertNames
from moeflow.models.layers.weight_allocator import WeightAllocator

_EXPERTS: Final = ExpertNames(gate="")
_DENSE: Final = NetworkNames(ups=("up_proj",))
_ACTIVATIONS: Final[dict[str, HiddenAct]] = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu": "relu"}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read the config. Raises: CheckpointError."""
    moe_layers = reader.raw.get("moe_layers")
    num_layers = reader.positive("num_hidden_layers", most=MAX_LAYERS)
    if not isinstance(moe_layers, list) or not all(type(it) is int and 0 <= it < num_layers for it in moe_layers):
        raise reader.error(
            f"'moe_layers' is {truncated_repr(moe_layers)}, where numbers below {num_layers} are expected"
        )
    positions = AddedPositions("learned", reader.positive("max_position_embeddings"))
    dense_layers = tuple(layer for layer in range(num_layers) if layer not in moe_layers)
    return read_biased_decoder(reader, "gpt_moe", positions, dense_layers)


def read_biased_decoder(
    reader: ConfigReader,
    model_type: str,
    positions: AddedPositions,
    dense_layers: tuple[int, ...],
) -> ModelConfig:
    """Return the shape of a decoder with layer norms, added positions and biases. Raises: CheckpointError."""
    hidden_size, num_heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    if hidden_size % num_heads:
        raise reader.error(f"'hidden_size' is {hidden_size}, no multiple of 'num_attention_heads', {num_heads}")
    activation = reader.get(str, "activation_function")
    if activation not in _ACTIVATIONS:
        raise reader.error(f"the activation is {truncated_repr(activation)}; supported are {', '.join(_ACTIVATIONS)}")
    width, num_experts = reader.positive("intermediate_size"), reader.get(int, "num_experts", 0)
    top_k = reader.positive("num_experts_per_tok") if num_experts else 0
    if top_k > max(num_experts, 0):
        raise reader.error(f"'num_experts_per_tok' is {top_k}, of {num_experts} experts")
    return ModelConfig.from_fields(
        model_type=model_type,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        num_layers=reader.positive("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=width,
        dense_intermediate_size=reader.positive("dense_intermediate_size", width),
        dense_layers=dense_layers if num_experts else (),
        max_position=positions.count,
        rope=None,
        added_positions=positions,
        eps=reader.number("layer_norm_eps", least=MIN_EPS, most=1.0),
        has_layer_norms=True,
        norm_bias=True,
        num_experts=num_experts,
        top_k=top_k,
        norm_topk_prob=top_k > 1,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        expert_bias=num_experts > 0,
        hidden_act=_ACTIVATIONS[activation],
        is_gated=False,
        tie_word_embeddings=reader.get(bool, "tie_word_embeddings", True),
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    choose = Routing(config.routing.top_k, renormalize=config.routing.norm_topk_prob)
    mlp = feed_forward(config, allocator, layer_idx, choose, _EXPERTS, dense_names=_DENSE)
    return DecoderLayer(config, allocator, Attention(config, allocator, layer_idx), mlp)
