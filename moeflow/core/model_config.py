"""A model's shape, in the field's standard terms, whatever its checkpoint called them.

Each model file turns its own `config.json` keys into this; `ConfigReader` makes a missing or mistyped key
an error instead of a silent default.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import msgspec

from moeflow.core.brief import brief
from moeflow.core.errors import CheckpointError
from moeflow.core.recurrent_config import RecurrentConfig

MOST = 1 << 48  # what any size may be: beyond all memory, and far from where 64 bits overflow
MAX_LAYERS: Final = 1 << 17  # far beyond what models have
Number = TypeVar("Number", int, float, bool, str)
HiddenAct = Literal["silu", "gelu", "gelu_tanh", "relu"]
_REQUIRED: Any = object()


KV_FORMATS: Final = {  # of keys and values: bytes of a number, and of the scale that a head's key or value has
    "float32": (4, 0),
    "float16": (2, 0),
    "bfloat16": (2, 0),
    "int8": (1, 4),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10000.0
    kind: str = "default"  # default, linear, llama3, yarn, longrope, proportional
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # of cos and sin; yarn; None: 0.1 ln(factor) + 1; longrope
    truncate: bool = True  # yarn: whether what is slowed begins and ends at whole dimensions
    pair_factors: tuple[float, ...] = ()  # longrope: by which each pair turns more slowly
    rotary_dim: int = 0  # dimensions of a head that are rotated, the first ones; 0: all of `ModelConfig.head_dim`
    turning_dim: int = 0  # proportional: of those, dimensions whose angles grow with the position; others stay
    is_interleaved: bool = False  # neighbours are rotated against each other, else halves


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """How many heads keys and values have, and how wide all heads are."""

    num_kv_heads: int
    head_dim: int
    values_are_keys: bool = False  # one projection makes both
    kv_layer: int | None = None  # the earlier layer whose keys and values they attend to; None: the layer has its own

    @property
    def has_keys(self) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.kv_layer is None

    @property
    def num_key_projections(self) -> int:
        """Projections that make keys and values: two, one for both, or none."""
        return (1 if self.values_are_keys else 2) if self.has_keys else 0


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """How a layer attends, in a model whose layers differ in that."""

    rope: RopeConfig | None  # None: queries and keys are not rotated
    sliding_window: int | None  # tokens a query sees, itself included; None: all
    heads: HeadSizes | None = None  # None: as `ModelConfig` has them


class LayerEmbeddings(msgspec.Struct, frozen=True):
    """A table that embeds tokens for each layer anew (Gemma 4): with what a layer's part of a row says it goes on."""

    size: int  # of each layer's part
    vocab_size: int  # rows


class LatentAttention(msgspec.Struct, frozen=True):
    """Keys and values as up-projections of one latent a token, which is what is kept of it (MLA, 2405.04434).

    All heads share a rotary key beside it. The model's one KV head is latent and rotary key side by side, of which the
    latent is the value, too; `head_dim` is the width of both.
    """

    q_lora_rank: int | None  # None: queries are projected at once, else down to so many and up again
    kv_lora_rank: int  # the latent
    nope_head_dim: int  # of a head's queries and keys what is not rotated,
    rope_head_dim: int  # and what is
    value_head_dim: int
    norm_eps: float  # of the norms of what is projected down

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's query as it is projected."""
        return self.nope_head_dim + self.rope_head_dim


class RelativePositions(msgspec.Struct, frozen=True):
    """Positions as learned additions to attention's scores, by distance, in buckets (T5, 1910.10683)."""

    num_buckets: int
    max_distance: int  # tokens further away than that share a bucket


class AddedPositions(msgspec.Struct, frozen=True):
    """Positions that are added to token embeddings."""

    kind: Literal["learned", "sinusoidal"]
    count: int  # how many there are, and so the longest context
    first_row: int = 0  # of the first position in the table


class EncoderConfig(msgspec.Struct, frozen=True):
    """What an encoder-decoder has beside its decoder; layers are as wide as the decoder's. A decoder may have none."""

    num_layers: int
    decoder_start_token_id: int  # that decoders begin with
    dense_layers: tuple[int, ...] = ()  # layers of an MoE model's encoder that have no experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a transformer's decoder, and of its encoder if it has one. Dense models have `num_experts` 0."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of one expert; in a dense model, of the feed-forward network
    max_position: int  # longest context the model was made for, in tokens
    rms_norm_eps: float  # of all norms
    has_layer_norms: bool = False  # norms subtract the mean
    norm_bias: bool = False  # of layer norms
    rope: RopeConfig | None  # None: positions are relative, or added to embeddings
    added_positions: AddedPositions | None = None
    relative_positions: RelativePositions | None = None
    encoder: EncoderConfig | None = None  # None: decoder-only
    recurrent: RecurrentConfig | None = None  # None: all layers attend
    labels: tuple[str, ...] = ()  # of the classes that it sorts texts into; empty: it does not
    num_experts: int = 0
    top_k: int = 0  # experts per token
    norm_topk_prob: bool = True
    min_topk_total: float = 0.0  # by which chosen weights that are to sum to 1 are divided at least
    routed_scaling_factor: float = 1.0  # of what chosen experts weigh
    num_expert_groups: int = 1  # of neighbours,
    num_chosen_groups: int = 1  # of which so many have experts to choose from
    unused_prefixes: tuple[str, ...] = ()  # of tensors' names that nothing is computed with, as of further predictors
    dense_layers: tuple[int, ...] = ()  # layers of an MoE model that have no experts
    dense_intermediate_size: int = 0  # of those layers
    wide_layers: tuple[int, ...] = ()  # layers of a dense model whose networks are twice as wide
    shared_intermediate_size: int = 0  # of an expert that all tokens of a layer go to besides; 0: there is none
    has_shared_gate: bool = False  # whether a number that it says of a token weighs its result
    tie_word_embeddings: bool = False
    layer_embeddings: LayerEmbeddings | None = None  # None: tokens are embedded once
    embedding_scale: float = 1.0  # of token embeddings as they go into the first layer
    logit_scale: float = 1.0  # of the hidden states that meet the output projection
    logit_soft_cap: float | None = None  # c: logits become c tanh(logit / c)
    attention_bias: bool = False  # of queries, keys and values
    attention_out_bias: bool = False
    has_attention_gate: bool = False  # with queries come as many numbers that say how much of a result is let through
    attention_scale: float | None = None  # of scores; None: head_dim^-0.5
    attention_soft_cap: float | None = None  # c: scores become c tanh(score / c)
    has_attention_sinks: bool = False  # a learned score of nothing for each head, in the softmax' denominator
    attention_kinds: tuple[AttentionKind, ...] = ()  # of each layer; empty: all have `rope` and `sliding_window`
    has_value_norms: bool = False  # values are normalised for each head, without weights
    has_post_norms: bool = False  # what attention and networks return is normalised before it is added, too
    # The shared expert's result and that of the chosen ones are normalised, too, before they are added.
    has_norms_of_experts: bool = False
    has_layer_scales: bool = False  # what comes out of a layer is multiplied by a number of its own
    latent: LatentAttention | None = None  # None: queries, keys and values are projected at once
    mlp_bias: bool = False
    lm_head_bias: bool = False
    sparsemixer_jitter: float | None = None  # of routers that choose as SparseMixer does; None: they do not
    expert_bias: bool = False  # of gates, ups and downs
    has_qk_norm: bool = False  # of families whose models may or may not normalise each head's queries and keys
    clip_qkv: float | None = None
    sliding_window: int | None = None  # tokens a query sees, itself included; None: all
    hidden_act: HiddenAct = "silu"
    is_gated: bool = True  # feed-forward networks and experts have three matrices, else two
    swiglu_limit: float | None = None  # of gates and ups, which then meet in (up + 1) gate sigmoid(swiglu_alpha gate)
    swiglu_alpha: float = 1.0

    @property
    def rotary(self) -> RopeConfig:
        """The rotary positions of a model that has them."""
        assert self.rope is not None, "positions are not rotary"
        return self.rope

    def attention_of(self, layer_idx: int) -> AttentionKind:
        """Return how a layer of the decoder attends."""
        if self.attention_kinds:
            return self.attention_kinds[layer_idx]
        return AttentionKind(self.rope, self.sliding_window)

    def heads_of(self, layer_idx: int) -> HeadSizes:
        """Return the heads of a layer of the decoder that attends."""
        return self.attention_of(layer_idx).heads or self._heads

    @property
    def _heads(self) -> HeadSizes:
        return HeadSizes(self.num_kv_heads, self.head_dim)

    @property
    def other_heads(self) -> dict[int, HeadSizes]:
        """The layers whose heads are others than most layers have."""
        kinds = enumerate(self.attention_kinds)
        return {layer_idx: kind.heads for layer_idx, kind in kinds if kind.heads not in (None, self._heads)}

    @property
    def qkv_size(self) -> int:
        """What queries, keys and values of a token take, in the layer where it is most."""
        of_heads = Counter(self.heads_of(layer_idx) for layer_idx in self.attention_layers) or [self._heads]
        return max((self.num_heads + 2 * heads.num_kv_heads) * heads.head_dim for heads in of_heads)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The decoder's layers that keep keys and values, ascending: those that attend, but not to another layer's."""
        return tuple(layer for layer in self.attention_layers if self.heads_of(layer).has_keys)

    @property
    def stage_borders(self) -> tuple[int, ...]:
        """The layers before which the decoder can be cut: no layer from there on attends to keys before it."""
        shared = [
            (heads.kv_layer, it) for it in self.attention_layers if (heads := self.heads_of(it)).kv_layer is not None
        ]
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
        return Counter(self.attention_of(layer).sliding_window for layer in self.attention_layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary positions that layers have, each once."""
        if not self.attention_kinds:
            return () if self.rope is None else (self.rope,)
        return tuple(dict.fromkeys(kind.rope for kind in self.attention_kinds if kind.rope is not None))

    @property
    def latent_dim(self) -> int:
        """How many dimensions of a key are its value, too; 0: values are stored by themselves."""
        return 0 if self.latent is None else self.latent.kv_lora_rank

    @property
    def attended_size(self) -> int:
        """Columns of a layer's output projection, on average."""
        return self._average_over_heads(self.attended_size_of)

    def attended_size_of(self, heads: HeadSizes) -> int:
        """Columns of the output projection of a layer that has these heads."""
        return self.num_heads * (heads.head_dim if self.latent is None else self.latent.value_head_dim)

    @property
    def attention_input_values(self) -> int:
        """Weights of one attention's projections of queries, keys and values, on average."""
        return self._average_over_heads(self._attention_input_values)

    def _attention_input_values(self, heads: HeadSizes) -> int:
        latent = self.latent
        if latent is None:
            num_queries = self.num_heads * (2 if self.has_attention_gate else 1)
            num_keys = heads.num_key_projections * heads.num_kv_heads
            return self.hidden_size * heads.head_dim * (num_queries + num_keys)
        queries = self.num_heads * latent.query_dim
        rank = latent.q_lora_rank
        q_values = self.hidden_size * queries if rank is None else rank * (self.hidden_size + queries)
        return q_values + self.hidden_size * heads.head_dim + self.latent_values

    def _average_over_heads(self, of_heads: Callable[[HeadSizes], int]) -> int:
        """Return the average over all attentions of what depends on a layer's heads."""
        return self._sum_over_heads(of_heads) // self.num_attentions if self.other_heads else of_heads(self._heads)

    def _sum_over_heads(self, of_heads: Callable[[HeadSizes], int]) -> int:
        """Return the sum over all attentions, those of encoders included."""
        others = self.other_heads.values()
        return sum(map(of_heads, others)) + (self.num_attentions - len(others)) * of_heads(self._heads)

    @property
    def latent_values(self) -> int:
        """Of these the up-projection from latents, which each pass applies to queries and to what is attended to."""
        latent = self.latent
        if latent is None:
            return 0
        return self.num_heads * (latent.nope_head_dim + latent.value_head_dim) * latent.kv_lora_rank

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
        dense = frozenset(self.dense_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in dense) if self.num_experts else ()

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, those of the encoder included."""
        return len(self.moe_layers) + self.num_encoder_moe_layers

    @property
    def num_encoder_moe_layers(self) -> int:
        """Layers of the encoder with experts; they come first where layers with experts are numbered."""
        if self.encoder is None or not self.num_experts:
            return 0
        return self.encoder.num_layers - len(self.encoder.dense_layers)

    @property
    def num_ffn_matrices(self) -> int:
        """Matrices of an expert, or of a dense network: gate, up and down, or without a gate."""
        return 3 if self.is_gated else 2

    @property
    def num_norms(self) -> int:
        """Norms of hidden states in a layer of the decoder."""
        return 2 + 2 * self.has_post_norms + 3 * self.has_norms_of_experts + (self.layer_embeddings is not None)

    @property
    def num_expert_biases(self) -> int:
        """Biases of one expert."""
        units = (self.num_ffn_matrices - 1) * self.intermediate_size
        return units + self.hidden_size if self.expert_bias else 0

    @property
    def num_attentions(self) -> int:
        """Attentions of all layers: those of a decoder over what was encoded are further ones."""
        return len(self.attention_layers) + (0 if self.encoder is None else self.num_layers + self.encoder.num_layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of all layers and embeddings, norms left out (under 0.1%)."""
        attention = self._sum_over_heads(
            lambda heads: self._attention_input_values(heads) + self.hidden_size * self.attended_size_of(heads)
        )
        matrices = self.num_ffn_matrices * self.hidden_size
        num_moe = self.num_moe_layers
        num_dense = self.num_layers + self.num_encoder_layers - num_moe
        expert = matrices * self.intermediate_size + self.num_expert_biases
        experts = num_moe * self.num_experts * (expert + self.hidden_size)
        shared = num_moe * (matrices * self.shared_intermediate_size + self.hidden_size * self.has_shared_gate)
        dense = matrices * (num_dense * self.dense_width + len(self.wide_layers) * self.dense_width)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        classifier = len(self.labels) * (self.hidden_size + 1)
        embeddings += self.num_learned_positions * self.hidden_size + self.layer_table_values
        embeddings += self.num_layers * self.layer_input_values
        mixers = 0
        if self.recurrent is not None:
            mixer_values = self.recurrent.projection_values(self.hidden_size) + self.recurrent.mixer.small_values
            mixers = len(self.recurrent.layers) * mixer_values
        return attention + mixers + experts + shared + dense + embeddings + classifier

    @property
    def dense_width(self) -> int:
        """Hidden units of the networks of layers without experts, but for wide ones."""
        return self.dense_intermediate_size if self.num_experts else self.intermediate_size

    def dense_width_of(self, layer_idx: int) -> int:
        """Return the hidden units of a layer's network."""
        return self.dense_width * (2 if layer_idx in self.wide_layers else 1)

    @property
    def layer_table_values(self) -> int:
        """Numbers of the table that embeds tokens for each layer, of which a token reads a row."""
        table = self.layer_embeddings
        return 0 if table is None else table.vocab_size * self.num_layers * table.size

    @property
    def layer_input_values(self) -> int:
        """Weights by which a layer makes its input of token embeddings, and goes on with that."""
        return 0 if self.layer_embeddings is None else 3 * self.layer_embeddings.size * self.hidden_size

    @property
    def num_learned_positions(self) -> int:
        """Rows of a table of positions that was learned."""
        added = self.added_positions
        return added.first_row + added.count if added is not None and added.kind == "learned" else 0

    @property
    def num_active_parameters(self) -> int:
        """Parameters one token's pass reads, the embedding table left out."""
        idle_experts = max(self.num_experts - self.top_k, 0)
        expert = self.num_ffn_matrices * self.hidden_size * self.intermediate_size
        idle = self.num_moe_layers * expert * idle_experts
        table = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_parameters - idle - table - self.layer_table_values

    def kv_bytes_per_token(self, kv_dtype: str, layer_idx: int | None = None) -> int:
        """Return what one token's keys and values take in a layer, in bytes; None: over all layers."""
        layers = [it for it in self.kv_layers if layer_idx in (None, it)]
        return self._kv_bytes(kv_dtype, layers)

    def most_kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the same of the layer in which they take most."""
        return max((self.kv_bytes_per_token(kv_dtype, layer) for layer in self.kv_layers), default=0)

    def attended_bytes_per_token(self, kv_dtype: str) -> int:
        """Return what is read of them by queries of all layers: once more where layers share them."""
        return self._kv_bytes(kv_dtype, self.attention_layers)

    def _kv_bytes(self, kv_dtype: str, layers: Sequence[int]) -> int:
        value_bytes, scale_bytes = KV_FORMATS[kv_dtype]
        num_rows = 2 if self.latent is None else 1  # keys and values, or both in one
        return sum(
            heads.num_kv_heads * (num_rows * heads.head_dim * value_bytes + 2 * scale_bytes)
            for heads in map(self.heads_of, layers)
        )


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
            raise self.error(f"{key!r} is {brief(value)}, where {kind.__name__} is expected")
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
            raise self.error(f"{key!r} is {brief(value)}, where {bound} is expected")
        return value

    def error(self, problem: str) -> CheckpointError:
        """Make the error that blames this file."""
        return CheckpointError(
            problem, file=self.file, remedy="Download or convert the model again, or correct this key"
        )
