"""How a model attends: heads, positions, windows, and the kinds of its layers."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


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
    truncate: bool = True  # yarn: whether the range of slowed dimensions is rounded to whole ones
    pair_factors: tuple[float, ...] = ()  # longrope: divisor of each pair's frequency
    rotary_dim: int = 0  # dimensions of a head that are rotated, the first ones; 0: all of `AttentionConfig.head_dim`
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
    heads: HeadSizes | None = None  # None: as `AttentionConfig` has them


class LatentConfig(msgspec.Struct, frozen=True):
    """Keys and values as up-projections of one stored latent per token (MLA, 2405.04434).

    All heads share an additional rotary key. The model's one KV head is the latent followed by the rotary key; the
    latent is also the value. `head_dim` is the width of both.
    """

    q_lora_rank: int | None  # None: queries are projected at once, else down to so many and up again
    kv_lora_rank: int  # the latent
    nope_head_dim: int  # unrotated dimensions of a head's queries and keys,
    rope_head_dim: int  # and what is
    value_head_dim: int
    norm_eps: float  # of the norms of down-projections

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's query as it is projected."""
        return self.nope_head_dim + self.rope_head_dim


class RelativePositions(msgspec.Struct, frozen=True):
    """Positions as learned additions to attention's scores, by distance, in buckets (T5, 1910.10683)."""

    num_buckets: int
    max_distance: int  # tokens further away than that share a bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention of all layers, or of most, where `layer_kinds` lists them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None: positions are relative, or added to embeddings
    relative_positions: RelativePositions | None = None
    sliding_window: int | None = None  # tokens a query sees, itself included; None: all
    layer_kinds: tuple[AttentionKind, ...] = ()  # of each layer; empty: all have `rope` and `sliding_window`
    latent: LatentConfig | None = None  # None: queries, keys and values are projected at once
    qkv_bias: bool = False
    out_bias: bool = False
    has_qk_norm: bool = False  # of families whose models may or may not normalise each head's queries and keys
    has_value_norms: bool = False  # values are normalised for each head, without weights
    clip_qkv: float | None = None
    has_output_gate: bool = False  # each query comes with as many numbers, which gate the attention's result
    has_sinks: bool = False  # a learned score of nothing for each head, in the softmax' denominator
    score_scale: float | None = None  # None: head_dim^-0.5
    score_soft_cap: float | None = None  # c: scores become c tanh(score / c)

    @property
    def rotary(self) -> RopeConfig:
        """The rotary positions of a model that has them."""
        assert self.rope is not None, "positions are not rotary"
        return self.rope

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary positions that layers have, each once."""
        if not self.layer_kinds:
            return () if self.rope is None else (self.rope,)
        return tuple(dict.fromkeys(kind.rope for kind in self.layer_kinds if kind.rope is not None))

    def of_layer(self, layer_idx: int) -> AttentionKind:
        """Return how a layer of the decoder attends."""
        if self.layer_kinds:
            return self.layer_kinds[layer_idx]
        return AttentionKind(self.rope, self.sliding_window)

    @property
    def heads(self) -> HeadSizes:
        """The heads of most layers."""
        return HeadSizes(self.num_kv_heads, self.head_dim)

    def heads_of(self, layer_idx: int) -> HeadSizes:
        """Return the heads of a layer of the decoder that attends."""
        return self.of_layer(layer_idx).heads or self.heads

    @property
    def other_heads(self) -> dict[int, HeadSizes]:
        """The layers with other heads than most layers have."""
        kinds = enumerate(self.layer_kinds)
        return {layer_idx: kind.heads for layer_idx, kind in kinds if kind.heads not in (None, self.heads)}

    def attended_size_of(self, heads: HeadSizes) -> int:
        """Return the columns of the output projection of a layer with these heads."""
        return self.num_heads * (heads.head_dim if self.latent is None else self.latent.value_head_dim)

    @property
    def latent_dim(self) -> int:
        """How many dimensions of a key are its value, too; 0: values are stored by themselves."""
        return 0 if self.latent is None else self.latent.kv_lora_rank

    @property
    def latent_values(self) -> int:
        """Weights of the up-projection from latents, which each pass applies to queries and to attended latents."""
        latent = self.latent
        if latent is None:
            return 0
        return self.num_heads * (latent.nope_head_dim + latent.value_head_dim) * latent.kv_lora_rank
