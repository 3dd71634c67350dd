"""A model's shape, in the field's standard terms, whatever its checkpoint called them.

Each model file turns its own `config.json` keys into this; `ConfigReader` makes a missing or mistyped key
an error instead of a silent default.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from moeflow.core.attention_config import AttentionConfig, HeadSizes
from moeflow.core.embedding_config import EmbeddingConfig
from moeflow.core.errors import CheckpointError
from moeflow.core.feed_forward_config import FeedForwardConfig, RoutingConfig
from moeflow.core.recurrent_config import RecurrentConfig
from moeflow.core.truncated_repr import truncated_repr

MOST = 1 << 48  # what any size may be: beyond all memory, and far from where 64 bits overflow
MAX_LAYERS: Final = 1 << 17  # far beyond what models have
Number = TypeVar("Number", int, float, bool, str)
_REQUIRED: Any = object()


KV_FORMATS: Final = {  # of keys and values: bytes of a number, and of the scale that a head's key or value has
    "float32": (4, 0),
    "float16": (2, 0),
    "bfloat16": (2, 0),
    "int8": (1, 4),
}


class EncoderConfig(msgspec.Struct, frozen=True):
    """What an encoder-decoder has beside its decoder; layers are as wide as the decoder's. A decoder may have none."""

    num_layers: int
    decoder_start_token_id: int  # that decoders begin with
    dense_layers: tuple[int, ...] = ()  # layers of an MoE model's encoder that have no experts


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """The norms of hidden states, and scales of layers."""

    eps: float  # of all norms
    has_layer_norms: bool = False  # norms subtract the mean
    norm_bias: bool = False  # of layer norms
    has_post_norms: bool = False  # the results of attention and networks are normalised before they are added, too
    # The shared expert's result and that of the chosen ones are normalised, too, before they are added.
    has_norms_of_experts: bool = False
    has_layer_scales: bool = False  # a number of its own multiplies each layer's output


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a transformer's decoder, and of its encoder if it has one. Dense models have `num_experts` 0."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int  # longest context the model was made for, in tokens
    attention: AttentionConfig
    feed_forward: FeedForwardConfig
    norms: NormConfig
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    embeddings: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    encoder: EncoderConfig | None = None  # None: decoder-only
    recurrent: RecurrentConfig | None = None  # None: all layers attend
    labels: tuple[str, ...] = ()  # classes of a text classifier; empty: it is none
    unused_prefixes: tuple[str, ...] = ()  # of tensors' names that no computation reads, as of further predictors

    @classmethod
    def from_fields(cls, **values: Any) -> ModelConfig:
        """Return a config of fields by name alone, as a flat `config.json` has them: each goes to its part.

        Raises: TypeError if a field is missing or unknown.
        """
        parts = {name: kind(**_taken(values, kind)) for name, kind in _PARTS.items()}
        return cls(**parts, **values)

    def with_fields(self, **changes: Any) -> ModelConfig:
        """Return this config with other values of some fields, named likewise. Raises: TypeError if one is unknown."""
        of_parts = {name: _taken(changes, kind) for name, kind in _PARTS.items()}
        parts = {name: replace(getattr(self, name), **found) for name, found in of_parts.items() if found}
        return replace(self, **parts, **changes)

    @property
    def qkv_size(self) -> int:
        """What queries, keys and values of a token take, in the layer where it is most."""
        attention = self.attention
        of_heads = Counter(map(attention.heads_of, self.attention_layers)) or [attention.heads]
        return max((attention.num_heads + 2 * heads.num_kv_heads) * heads.head_dim for heads in of_heads)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The decoder's layers with keys and values of their own, ascending."""
        return tuple(layer for layer in self.attention_layers if self.attention.heads_of(layer).has_keys)

    @property
    def stage_borders(self) -> tuple[int, ...]:
        """The layers before which the decoder can be cut: no layer from there on attends to keys before it."""
        sources = ((self.attention.heads_of(layer).kv_layer, layer) for layer in self.attention_layers)
        shared = [(own, layer) for own, layer in sources if own is not None]
        return tuple(
            border for border in range(1, self.num_layers) if not any(own < border <= layer for own, layer in shared)
        )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The decoder's layers that attend, ascending."""
        recurrent = frozenset(() if self.recurrent is None else self.recurrent.layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in recurrent)

    @property
    def state_bytes(self) -> int:
        """What the state of one sequence takes in recurrent layers."""
        return 0 if self.recurrent is None else self.recurrent.state_bytes

    @property
    def sliding_windows(self) -> Counter[int | None]:
        """How many of the decoder's layers that attend have each window."""
        return Counter(self.attention.of_layer(layer).sliding_window for layer in self.attention_layers)

    @property
    def attended_size(self) -> int:
        """Columns of a layer's output projection, on average."""
        return self._average_over_heads(self.attention.attended_size_of)

    @property
    def attention_input_values(self) -> int:
        """Weights of one attention's projections of queries, keys and values, on average."""
        return self._average_over_heads(self._attention_input_values)

    def _attention_input_values(self, heads: HeadSizes) -> int:
        attention, latent = self.attention, self.attention.latent
        if latent is None:
            num_queries = attention.num_heads * (2 if attention.has_output_gate else 1)
            num_keys = heads.num_key_projections * heads.num_kv_heads
            return self.hidden_size * heads.head_dim * (num_queries + num_keys)
        queries = attention.num_heads * latent.query_dim
        rank = latent.q_lora_rank
        q_values = self.hidden_size * queries if rank is None else rank * (self.hidden_size + queries)
        return q_values + self.hidden_size * heads.head_dim + attention.latent_values

    def _average_over_heads(self, of_heads: Callable[[HeadSizes], int]) -> int:
        """Return the average over all attentions of what depends on a layer's heads."""
        if not self.attention.other_heads:
            return of_heads(self.attention.heads)
        return self._sum_over_heads(of_heads) // self.num_attentions

    def _sum_over_heads(self, of_heads: Callable[[HeadSizes], int]) -> int:
        """Return the sum over all attentions, those of encoders included."""
        others = self.attention.other_heads.values()
        return sum(map(of_heads, others)) + (self.num_attentions - len(others)) * of_heads(self.attention.heads)

    @property
    def is_encoder_only(self) -> bool:
        """Whether there is no decoder: it generates nothing."""
        return self.encoder is not None and not self.num_layers

    @property
    def num_encoder_layers(self) -> int:
        """Layers of the encoder, if there is one."""
        return 0 if self.encoder is None else self.encoder.num_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder's layers with experts, ascending."""
        if not self.routing.num_experts:
            return ()
        dense = frozenset(self.feed_forward.dense_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, those of the encoder included."""
        return len(self.moe_layers) + self.num_encoder_moe_layers

    def moe_numbers_in(self, layers: range) -> list[int]:
        """Return the numbers of a stage's layers with experts: all of the encoder, some of the decoder's `layers`."""
        before = self.num_encoder_moe_layers
        return [*range(before), *(before + n for n, layer in enumerate(self.moe_layers) if layer in layers)]

    @property
    def num_encoder_moe_layers(self) -> int:
        """Layers of the encoder with experts; they come first where layers with experts are numbered."""
        if self.encoder is None or not self.routing.num_experts:
            return 0
        return self.encoder.num_layers - len(self.encoder.dense_layers)

    @property
    def num_norms(self) -> int:
        """Norms of hidden states in a layer of the decoder."""
        has_input = self.embeddings.layer_embeddings is not None
        return 2 + 2 * self.norms.has_post_norms + 3 * self.norms.has_norms_of_experts + has_input

    @property
    def num_expert_biases(self) -> int:
        """Biases of one expert."""
        units = (self.feed_forward.num_matrices - 1) * self.feed_forward.intermediate_size
        return units + self.hidden_size if self.feed_forward.expert_bias else 0

    @property
    def num_attentions(self) -> int:
        """Attentions of all layers; cross-attentions of a decoder count separately."""
        return len(self.attention_layers) + (0 if self.encoder is None else self.num_layers + self.encoder.num_layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of all layers and embeddings, norms left out (under 0.1%)."""
        networks, outputs = self.feed_forward, self.attention.attended_size_of
        attention = self._sum_over_heads(
            lambda heads: self._attention_input_values(heads) + self.hidden_size * outputs(heads)
        )
        matrices = networks.num_matrices * self.hidden_size
        num_moe = self.num_moe_layers
        num_dense = self.num_layers + self.num_encoder_layers - num_moe
        expert = matrices * networks.intermediate_size + self.num_expert_biases
        experts = num_moe * self.routing.num_experts * (expert + self.hidden_size)
        shared = num_moe * (matrices * networks.shared_intermediate_size + self.hidden_size * networks.has_shared_gate)
        dense = matrices * (num_dense * self.dense_width + len(networks.wide_layers) * self.dense_width)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.embeddings.tie_word_embeddings else 2)
        classifier = len(self.labels) * (self.hidden_size + 1)
        embeddings += self.embeddings.num_learned_positions * self.hidden_size + self.layer_table_values
        embeddings += self.num_layers * self.layer_input_values
        mixers = 0
        if self.recurrent is not None:
            mixer_values = self.recurrent.projection_values(self.hidden_size) + self.recurrent.mixer.small_values
            mixers = len(self.recurrent.layers) * mixer_values
        return attention + mixers + experts + shared + dense + embeddings + classifier

    @property
    def dense_width(self) -> int:
        """Hidden units of the networks of layers without experts, but for wide ones."""
        networks = self.feed_forward
        return networks.dense_intermediate_size if self.routing.num_experts else networks.intermediate_size

    def dense_width_of(self, layer_idx: int) -> int:
        """Return the hidden units of a layer's network."""
        return self.dense_width * (2 if layer_idx in self.feed_forward.wide_layers else 1)

    @property
    def layer_table_values(self) -> int:
        """Numbers of the table that embeds tokens for each layer; a token reads one row."""
        table = self.embeddings.layer_embeddings
        return 0 if table is None else table.vocab_size * self.num_layers * table.size

    @property
    def layer_input_values(self) -> int:
        """Weights that make a layer's additional input from token embeddings, and apply it."""
        table = self.embeddings.layer_embeddings
        return 0 if table is None else 3 * table.size * self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Parameters one token's pass reads, the embedding table left out."""
        idle_experts = max(self.routing.num_experts - self.routing.top_k, 0)
        expert = self.feed_forward.num_matrices * self.hidden_size * self.feed_forward.intermediate_size
        idle = self.num_moe_layers * expert * idle_experts
        table = 0 if self.embeddings.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_parameters - idle - table - self.layer_table_values

    def kv_bytes_per_token(self, kv_dtype: str, layer_idx: int | None = None) -> int:
        """Return what one token's keys and values take in a layer, in bytes; None: over all layers."""
        layers = [it for it in self.kv_layers if layer_idx in (None, it)]
        return self._kv_bytes(kv_dtype, layers)

    def most_kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the maximum over layers."""
        return max((self.kv_bytes_per_token(kv_dtype, layer) for layer in self.kv_layers), default=0)

    def attended_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the bytes read by queries of all layers; shared ones count for each layer."""
        return self._kv_bytes(kv_dtype, self.attention_layers)

    def _kv_bytes(self, kv_dtype: str, layers: Sequence[int]) -> int:
        value_bytes, scale_bytes = KV_FORMATS[kv_dtype]
        num_rows = 2 if self.attention.latent is None else 1  # keys and values, or both in one
        return sum(
            heads.num_kv_heads * (num_rows * heads.head_dim * value_bytes + 2 * scale_bytes)
            for heads in map(self.attention.heads_of, layers)
        )


_PARTS: Final[Mapping[str, Any]] = {
    "attention": AttentionConfig,
    "feed_forward": FeedForwardConfig,
    "norms": NormConfig,
    "routing": RoutingConfig,
    "embeddings": EmbeddingConfig,
}


def _taken(values: dict[str, Any], part: Any) -> dict[str, Any]:
    """Remove the fields of a part from `values`, and return them."""
    return {one.name: values.pop(one.name) for one in fields(part) if one.name in values}


class ConfigReader:
    """Typed access to a `config.json`: wrong or missing keys are errors that name file, key and remedy."""

    def __init__(self, raw: Mapping[str, Any], file: Path | str) -> None:
        self.raw = raw
        self.file = file

    def get(self, kind: type[Number], key: str, default: Any = _REQUIRED) -> Number:
        """Return `raw[key]` as `kind`; null counts as missing.

        Raises: CheckpointError if the key is missing without a default, or of another type.
        """
        value = self.raw.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"has no {key!r}")
            return cast(Number, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < MOST else math.inf
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f"{key!r} is {truncated_repr(value)}, where {kind.__name__} is expected")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(f"{key!r} is {value!r}, which is no finite number")
        return value

    def positive(self, key: str, default: Any = _REQUIRED, *, most: int = MOST) -> int:
        """Return a whole number from 1 to `most`."""
        value = self.get(int, key, default)
        return int(self._within(key, value, 1, most))

    def number(self, key: str, default: Any = _REQUIRED, *, least: float, most: float) -> float:
        """Return a number from `least` to `most`."""
        return self._within(key, self.get(float, key, default), least, most)

    def _within(self, key: str, value: float, least: float, most: float) -> float:
        if not least <= value <= most:
            bound = f"at least {least:g}" if value < least else f"at most {most:g}"
            raise self.error(f"{key!r} is {truncated_repr(value)}, where {bound} is expected")
        return value

    def error(self, problem: str) -> CheckpointError:
        """Make the error that blames this file."""
        return CheckpointError(
            problem, file=self.file, remedy="Download or convert the model again, or correct this key"
        )
