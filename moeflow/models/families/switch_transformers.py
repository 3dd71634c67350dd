"""Switch Transformers (2101.03961): T5 with experts in some layers, one for each token.

Experts take all tokens unless the user sets a capacity factor. transformers' `expert_capacity` is for training on
devices of fixed shapes. The value in `config.json` is not applied.
"""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import MAX_LAYERS, ConfigReader, EncoderConfig, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.families.t5 import num_decoder_layers, read_activation, read_encoder_decoder, read_start_token
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM, LayerPlace
from moeflow.models.layers.mlp import MLP, FusedMLP, NetworkNames, dense_mlp
from moeflow.models.layers.moe import ExpertNames, MoE, expert_kind
from moeflow.models.layers.weight_allocator import WeightAllocator

_EXPERTS: Final = ExpertNames(
    block="mlp", router="router.classifier", expert="experts.expert_{}", gate="", up="wi", down="wo"
)
_DENSE: Final = NetworkNames(block="mlp", ups=("wi",), down="wo")


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    if reader.get(bool, "router_bias", False):
        raise reader.error("'router_bias' is true, where only false is supported")
    num_layers = reader.positive("num_layers", most=MAX_LAYERS)
    num_decoding = num_decoder_layers(reader, num_layers)
    intermediate_size = reader.positive("d_ff")
    is_tied = reader.get(bool, "tie_word_embeddings", True) or not num_decoding
    return read_encoder_decoder(
        reader,
        model_type="switch_transformers",
        hidden_act=read_activation(reader, "dense_act_fn"),
        is_gated=False,
        encoder=EncoderConfig(
            num_layers,
            read_start_token(reader),
            dense_layers=_dense_layers(num_layers, reader.get(int, "num_sparse_encoder_layers", 3)),
        ),
        tie_word_embeddings=is_tied,
        scales_outputs=is_tied,
        num_experts=reader.positive("num_experts"),
        top_k=1,
        norm_topk_prob=False,
        dense_layers=_dense_layers(num_decoding, reader.get(int, "num_sparse_decoder_layers", 3)),
        dense_intermediate_size=intermediate_size,
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> EncoderDecoderLM:
    """Return the model with its weights still to be filled."""
    return EncoderDecoderLM(config, allocator, _network)


def _network(config: ModelConfig, allocator: WeightAllocator, place: LayerPlace) -> MLP | FusedMLP | MoE:
    assert config.encoder is not None
    dense = config.encoder.dense_layers if place.is_encoder else config.feed_forward.dense_layers
    if place.layer_idx in dense:
        return dense_mlp(
            allocator, config.hidden_size, config.feed_forward.dense_intermediate_size, expert_kind(config), _DENSE
        )
    return MoE(config, allocator, Routing(1), _EXPERTS)


def _dense_layers(num_layers: int, num_sparse: int) -> tuple[int, ...]:
    """Return which layers have no experts, by transformers' rule: every so manyth has some, from the second on."""
    step = num_layers // num_sparse if num_sparse > 0 else num_layers
    if step == 1:
        return ()
    return tuple(layer for layer in range(num_layers) if step == 0 or layer % step != 1)
