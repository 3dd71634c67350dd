"""Which format each matrix of a model gets where several are mixed to make the most of about four bits.

Blocks of two levels (K-quants) are best and need columns in multiples of 256. For other matrices there are blocks of 32
values, for the few that do not even fit these the formats that are filled up.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.weight_format import BLOCK_COLUMNS, LayerFormats, Mix, WeightFormat

_SMALL_BLOCK: Final = 32  # columns


class MixedFormats(msgspec.Struct, frozen=True):
    """The formats of a model."""

    matrices: WeightFormat  # that most values are in
    embeddings: WeightFormat  # and the output projection
    layers: tuple[LayerFormats, ...] = ()  # empty: all matrices are in the one


def mixed_formats(mix: Mix, shape: ModelConfig, *, can_differ: bool = True) -> MixedFormats:
    """Return the formats of a mix for a model of some shape; one for all of its matrices if they cannot differ.

    "q4_k": four bits, but six for attention's values, which are few. Their errors cost most: on the built-in model,
    0.4% of the bytes remove 28% of the divergence. "q4_k_m": also six for the downs of the first layers, the last and
    some between. These write to the residual stream. Five instead of four where columns are no whole blocks of two
    levels.

    Raises: ConfigError if matrices cannot differ where a mix needs that.
    """
    embeddings = _six_bits(shape.hidden_size)
    if shape.encoder is not None or not can_differ:
        if mix != "q4_k":
            raise ConfigError(
                f"--quantize {mix} has matrices of several formats, which do not go with encoders, recurrent layers, "
                "or --remote-experts: use --quantize q4_k"
            )
        return MixedFormats(_four_bits(*_columns(shape)), embeddings)  # all alike
    layers = tuple(_layer(mix, shape, layer) for layer in range(shape.num_layers))
    ((commonest, _), *others) = _values(shape, layers).most_common()
    return MixedFormats(commonest, embeddings, layers if others else ())


def _layer(mix: Mix, shape: ModelConfig, layer: int) -> LayerFormats:
    is_medium, width = mix == "q4_k_m", _width(shape, layer)
    most = _four_bits_or_five if is_medium else _four_bits
    q_rank = shape.attention.latent.q_lora_rank if shape.attention.latent is not None else None
    downs = _six_bits if is_medium and _matters_more(layer, shape.num_layers) else most
    has_shared = shape.feed_forward.shared_intermediate_size and layer not in shape.feed_forward.dense_layers
    return LayerFormats(
        q_proj=most(shape.hidden_size) if q_rank is None else most(shape.hidden_size, q_rank),
        k_proj=most(shape.hidden_size)
        if shape.attention.latent is None
        else _six_bits(shape.hidden_size),  # values, too
        v_proj=_six_bits(shape.hidden_size),
        o_proj=most(_attended(shape)),
        up=most(shape.hidden_size),
        down=downs(width),
        shared_down=downs(shape.feed_forward.shared_intermediate_size) if has_shared else None,
        layer_input=most(shape.hidden_size, shape.embeddings.layer_embeddings.size)
        if shape.embeddings.layer_embeddings
        else None,
    )


def _matters_more(layer: int, num_layers: int) -> bool:
    """Return whether a layer is of the first eighth, of the last, or every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= num_layers - eighth or (layer - eighth) % 3 == 2


def _four_bits(*columns: int) -> WeightFormat:
    if _are_multiples(columns, BLOCK_COLUMNS):
        return "q4_k"
    return "iq4_nl" if _are_multiples(columns, _SMALL_BLOCK) else "int4"


def _four_bits_or_five(*columns: int) -> WeightFormat:
    if _are_multiples(columns, BLOCK_COLUMNS):
        return "q4_k"
    return "q5_0" if _are_multiples(columns, _SMALL_BLOCK) else "int8"


def _six_bits(*columns: int) -> WeightFormat:
    return "q6_k" if _are_multiples(columns, BLOCK_COLUMNS) else "int8"


def _are_multiples(columns: tuple[int, ...], block: int) -> bool:
    return all(cols % block == 0 for cols in columns)


def _columns(shape: ModelConfig) -> tuple[int, ...]:
    """Return the columns of all matrices."""
    others = (
        width
        for width in (shape.feed_forward.dense_intermediate_size, shape.feed_forward.shared_intermediate_size)
        if width
    )
    return (shape.hidden_size, _attended(shape), shape.feed_forward.intermediate_size, *others)


def _attended(shape: ModelConfig) -> int:
    return shape.attended_size


def _width(shape: ModelConfig, layer: int) -> int:
    """Return the units of a layer's experts, or of its dense network."""
    is_dense = layer in shape.feed_forward.dense_layers or not shape.routing.num_experts
    return shape.dense_width_of(layer) if is_dense else shape.feed_forward.intermediate_size


def _values(shape: ModelConfig, layers: tuple[LayerFormats, ...]) -> Counter[WeightFormat]:
    """Return how many values are in each format."""
    values: Counter[WeightFormat] = Counter()
    hidden, keys = shape.hidden_size, shape.attention.num_kv_heads * shape.attention.head_dim
    queries = (
        shape.attention_input_values
        - shape.attention.latent_values
        - hidden * keys * (2 if shape.attention.latent is None else 1)
    )
    for layer, formats in enumerate(layers):
        networks = (
            shape.routing.num_experts
            if shape.routing.num_experts and layer not in shape.feed_forward.dense_layers
            else 1
        )
        matrix = networks * hidden * _width(shape, layer)
        shared = 0 if layer in shape.feed_forward.dense_layers else hidden * shape.feed_forward.shared_intermediate_size
        for weight_format, count in (
            (formats.q_proj, queries),
            (formats.k_proj, hidden * keys),
            (formats.v_proj, hidden * keys if shape.attention.latent is None else 0),
            (formats.o_proj, hidden * _attended(shape)),
            (formats.up, (shape.feed_forward.num_matrices - 1) * matrix),
            (formats.down, matrix),
            (formats.of("shared_up"), (shape.feed_forward.num_matrices - 1) * shared),
            (formats.of("shared_down"), shared),
            (formats.of("layer_input"), 2 * shape.layer_input_values // 3),
        ):
            values[weight_format] += count
    return values
