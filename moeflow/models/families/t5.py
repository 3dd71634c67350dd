"""T5 (1910.10683): an encoder and a decoder with relative positions."""

from __future__ import annotations

from typing import Any, Final, cast

from moeflow.core.attention_config import RelativePositions
from moeflow.core.feed_forward_config import HiddenAct
from moeflow.core.model_config import MAX_LAYERS, ConfigReader, EncoderConfig, ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.models.config_keys import MIN_EPS
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM, LayerPlace
from moeflow.models.layers.mlp import MLP, FusedMLP, NetworkNames, dense_mlp
from moeflow.models.layers.moe import MoE, expert_kind
from moeflow.models.layers.weight_allocator import WeightAllocator

# Relative positions have no longest context, and published configs mostly have that of a model's training.
MAX_POSITION: Final = 8192
MAX_DISTANCE: Final = 1 << 16
_ACTIVATIONS: Final[dict[str, HiddenAct]] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
}
_GATED: Final[dict[str, HiddenAct]] = {"gated-gelu": "gelu_tanh", "gated-silu": "silu", "gated-relu": "relu"}
_CLASSIFIER: Final = "ForSequenceClassification"
_ENCODERS: Final = ("EncoderModel", _CLASSIFIER)  # how classes without a decoder are named
_NAMES: Final = NetworkNames(block="DenseReluDense", ups=("wi",), down="wo")
_UNUSED: Final = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # in old files
_GATED_NAMES: Final = NetworkNames(block="DenseReluDense", ups=("wi_0", "wi_1"), down="wo")


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    named = reader.get(str, "feed_forward_proj", "relu")
    is_gated = named in _GATED
    encoder = EncoderConfig(reader.positive("num_layers", most=MAX_LAYERS), read_start_token(reader))
    # What old configs say by untying embeddings, new ones say by this, and are tied.
    scales_outputs = reader.get(bool, "scale_decoder_outputs", reader.get(bool, "tie_word_embeddings", True))
    scales_outputs |= num_decoder_layers(reader, 1) == 0  # there is no projection
    return read_encoder_decoder(
        reader,
        model_type="t5",
        hidden_act=_GATED[named] if is_gated else read_activation(reader, "feed_forward_proj"),
        is_gated=is_gated,
        encoder=encoder,
        tie_word_embeddings=scales_outputs,
        scales_outputs=scales_outputs,
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> EncoderDecoderLM:
    """Return the model with its weights still to be filled."""
    return EncoderDecoderLM(config, allocator, _network)


def read_encoder_decoder(
    reader: ConfigReader, *, encoder: EncoderConfig, scales_outputs: bool, **family: Any
) -> ModelConfig:
    """Return the model's shape; `family` adds fields of `ModelConfig`. Raises: CheckpointError."""
    hidden_size, num_heads = reader.positive("d_model"), reader.positive("num_heads")
    head_dim = reader.positive("d_kv", max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise reader.error(f"'d_kv' is {head_dim}, where an even number is expected")
    num_layers = num_decoder_layers(reader, encoder.num_layers)
    return ModelConfig.from_fields(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        labels=_read_labels(reader),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=reader.positive("d_ff"),
        max_position=MAX_POSITION,
        eps=reader.number("layer_norm_epsilon", 1e-6, least=MIN_EPS, most=1.0),
        rope=None,
        relative_positions=_read_positions(reader),
        encoder=encoder,
        unused_prefixes=(_UNUSED,) if num_layers else (_UNUSED, "lm_head.weight"),
        logit_scale=hidden_size**-0.5 if scales_outputs else 1.0,
        **family,
    )


def num_decoder_layers(reader: ConfigReader, default: int) -> int:
    """Return how many layers the decoder has: none where the checkpoint is an encoder alone."""
    if _has_class(reader, _ENCODERS):
        return 0
    return reader.positive("num_decoder_layers", default, most=MAX_LAYERS)


def _has_class(reader: ConfigReader, endings: tuple[str, ...]) -> bool:
    named = reader.raw.get("architectures")
    return isinstance(named, list) and any(isinstance(it, str) and it.endswith(endings) for it in named)


def _read_labels(reader: ConfigReader) -> tuple[str, ...]:
    """Return the names of a classifier's classes, in their order."""
    if not _has_class(reader, (_CLASSIFIER,)):
        return ()
    named = reader.raw.get("id2label")
    if isinstance(named, dict):
        labels = tuple(named.get(str(place)) for place in range(len(named)))
        if len(labels) >= 2 and all(isinstance(label, str) for label in labels):
            return cast(tuple[str, ...], labels)
    raise reader.error(f"'id2label' is {truncated_repr(named)}, where the names of two or more classes are expected")


def read_activation(reader: ConfigReader, key: str) -> HiddenAct:
    """Return what networks of two matrices make of their units."""
    named = reader.get(str, key, "relu")
    if named not in _ACTIVATIONS:
        raise reader.error(f"{key!r} is {truncated_repr(named)}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[named]


def read_start_token(reader: ConfigReader) -> int:
    """Return the first token of decoders: like transformers, the padding token by default."""
    token_id = reader.get(int, "decoder_start_token_id", reader.get(int, "pad_token_id", 0))
    if not 0 <= token_id < reader.positive("vocab_size"):
        raise reader.error(f"'decoder_start_token_id' is {token_id}, no token of the vocabulary")
    return token_id


def _read_positions(reader: ConfigReader) -> RelativePositions:
    num_buckets = reader.positive("relative_attention_num_buckets", 32, most=MAX_DISTANCE)
    max_distance = reader.positive("relative_attention_max_distance", 128, most=MAX_DISTANCE)
    if num_buckets < 4 or num_buckets % 4 or max_distance <= num_buckets // 2:
        raise reader.error(
            f"{num_buckets} buckets of relative positions up to a distance of {max_distance}: a multiple of 4, "
            "and a distance of more than half as many, are expected"
        )
    return RelativePositions(num_buckets, max_distance)


def _network(config: ModelConfig, allocator: WeightAllocator, place: LayerPlace) -> MLP | FusedMLP | MoE:
    names = _GATED_NAMES if config.feed_forward.is_gated else _NAMES
    return dense_mlp(allocator, config.hidden_size, config.feed_forward.intermediate_size, expert_kind(config), names)
