"""What each stage of a model reads and computes, from its shape and the formats of its weights.

A stage becomes `Work`: bytes of weights or of keys and values, each read once, and operations; activations within a
stage are left out. What lies between the stages is `row_operations`. Knows no machine.
Stages are those of MoE-Lightning 4.1: pre-attention (QKV), attention, post-attention (output projection, router,
experts); and the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.weight_format import BITS_PER_VALUE
from moeflow.planner.costs.rank_shares import WHOLE, RankShares

FLOAT16_BITS = 16.0
FLOAT32_BYTES = 4  # of a norm's weight, in every format


@dataclass(frozen=True, slots=True)
class Work:
    """Something to compute: what it reads and does, and by which kernel."""

    kernel: str  # one of core.hardware.KERNELS
    dtype: str  # of what is read
    num_bytes: float
    num_flops: float
    rows: float  # that meet each weight; for attention, queries that share K and V
    values: int  # of a matrix (an expert's together), a row, or, for attention, of K and V at one position

    @property
    def intensity(self) -> float:
        """Operations a byte: I of MoE-Lightning, definition 3.1."""
        return self.num_flops / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """In which formats a model is kept."""

    matrices: str
    embeddings: str
    kv: str
    activation_bytes: int = 4  # of one value between operations
    routers: str | None = None  # None: as matrices

    @property
    def of_routers(self) -> str:
        """The format of what chooses experts."""
        return self.routers or self.matrices

    @property
    def weight_bytes(self) -> float:
        """Bytes of one value of a matrix."""
        return bits_per_value(self.matrices) / 8


def bits_per_value(dtype: str) -> float:
    """Return what a value takes, its share of a scale included."""
    return FLOAT16_BITS if dtype == "float16" else BITS_PER_VALUE[dtype]


def expected_distinct(num_experts: int, top_k: int, num_tokens: float) -> float:
    """Return how many experts of a layer so many tokens reach on average, if routers choose evenly."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens) if num_experts else 0.0


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The costs of one model in given formats."""

    shape: ModelConfig
    formats: Formats

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, those of an encoder included."""
        return self.shape.num_moe_layers

    @property
    def num_dense_layers(self) -> int:
        """Layers with a plain feed-forward network, those of an encoder included."""
        return self.shape.num_layers + self.shape.num_encoder_layers - self.num_moe_layers

    @property
    def qkv_values(self) -> int:
        """Weights of one layer's query, key and value projection."""
        shape = self.shape
        return shape.hidden_size * shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)

    @property
    def output_values(self) -> int:
        """Weights of one layer's output projection."""
        return self.shape.hidden_size * self.shape.head_dim * self.shape.num_heads

    @property
    def expert_values(self) -> int:
        """Weights of one expert."""
        return self.shape.num_ffn_matrices * self.shape.hidden_size * self.shape.intermediate_size

    @property
    def dense_values(self) -> int:
        """Weights of the feed-forward network of one layer that has no experts."""
        return self.shape.num_ffn_matrices * self.shape.hidden_size * self.dense_width

    @property
    def dense_width(self) -> int:
        """Hidden units of that network."""
        return self.shape.dense_intermediate_size if self.shape.num_experts else self.shape.intermediate_size

    @property
    def router_values(self) -> int:
        """Weights of one router."""
        return self.shape.hidden_size * self.shape.num_experts

    @property
    def expert_bytes(self) -> float:
        """One expert."""
        return self.expert_values * self.formats.weight_bytes

    @property
    def experts_bytes(self) -> float:
        """All experts of all layers."""
        return self.num_moe_layers * self.shape.num_experts * self.expert_bytes

    @property
    def layers_bytes(self) -> float:
        """All layers, experts included."""
        return self._layers_bytes(WHOLE)

    @property
    def embedding_bytes(self) -> float:
        """Token embeddings and output projection, which may be one."""
        shape = self.shape
        num_tables = 1 if shape.tie_word_embeddings else 2
        return num_tables * shape.vocab_size * shape.hidden_size * bits_per_value(self.formats.embeddings) / 8

    @property
    def model_bytes(self) -> float:
        """All weights; norms over single heads and biases are left out (under 0.1%)."""
        return self.bytes_of(WHOLE)

    @property
    def norm_bytes(self) -> int:
        """The norms of all layers and the last."""
        return (2 * self.shape.num_layers + 1) * self.shape.hidden_size * FLOAT32_BYTES

    @property
    def encoder_bytes(self) -> float:
        """What an encoder-decoder has beside a decoder's layers: the encoder's, and attention over what it encodes."""
        shape, encoder = self.shape, self.shape.encoder
        if encoder is None:
            return 0.0
        num_dense = len(encoder.dense_layers) if shape.num_experts else encoder.num_layers
        num_moe = encoder.num_layers - num_dense
        attention = (encoder.num_layers + shape.num_layers) * (self.qkv_values + self.output_values)
        routers = num_moe * self.router_values * bits_per_value(self.formats.of_routers) / 8
        norms = (2 * encoder.num_layers + shape.num_layers + 1) * shape.hidden_size * FLOAT32_BYTES
        experts = num_moe * shape.num_experts * self.expert_bytes
        return (attention + num_dense * self.dense_values) * self.formats.weight_bytes + routers + norms + experts

    def bytes_of(self, shares: RankShares) -> float:
        """Return the weights of a rank that has these shares; an output projection that is the token embeddings is
        whole, as they are, and so is an encoder.
        """
        tables = 0.0
        if shares.has_ends:
            tables = 1.0 if self.shape.tie_word_embeddings else (1 + shares.head) / 2
        num_norms = 2 * len(self._layers_of(shares)) + 1
        norm_bytes = num_norms * self.shape.hidden_size * FLOAT32_BYTES
        return self._layers_bytes(shares) + self.embedding_bytes * tables + norm_bytes + self.encoder_bytes

    def _layers_of(self, shares: RankShares) -> range:
        return range(self.shape.num_layers) if shares.layers is None else shares.layers

    def _layers_bytes(self, shares: RankShares) -> float:
        shape, layers = self.shape, self._layers_of(shares)
        num_moe = len(set(layers).difference(shape.dense_layers)) if shape.num_experts else 0
        heads = shape.num_heads * shares.queries + 2 * shape.num_kv_heads * shares.keys
        attention = shape.hidden_size * shape.head_dim * heads + self.output_values * shares.outputs
        outside = len(layers) * attention + (len(layers) - num_moe) * self.dense_values * shares.dense
        routers = num_moe * self.router_values * bits_per_value(self.formats.of_routers) / 8
        experts = num_moe * shape.num_experts * self.expert_bytes * shares.experts
        return outside * self.formats.weight_bytes + routers + experts

    @property
    def kv_layer_bytes(self) -> float:
        """Keys and values of one token in one layer."""
        return self.kv_bytes / max(self.shape.num_layers, 1)

    @property
    def kv_bytes(self) -> float:
        """Keys and values of one token in all layers."""
        return self.shape.kv_bytes_per_token(self.formats.kv)

    def pre_attention(self, num_tokens: float) -> Work:
        """Return one layer's query, key and value projection."""
        return self._linear(self.qkv_values, num_tokens, self.formats.matrices)

    def attention(self, num_tokens: float, num_seen: float, num_read: float) -> Work:
        """Return one layer's attention, softmax part (thesis 4.25 without projections).

        num_seen: positions that queries look at, summed over all tokens; num_read: positions whose K and V are read,
        once for all queries of a sequence.
        """
        shape = self.shape
        queries = shape.num_heads / shape.num_kv_heads * max(num_seen / num_read if num_read else 1.0, 1.0)
        return Work(
            "attention",
            self.formats.kv,
            num_read * self.kv_layer_bytes,
            4.0 * shape.num_heads * shape.head_dim * num_seen,
            queries,
            2 * shape.num_kv_heads * shape.head_dim,
        )

    def decode_attention(self, num_sequences: float, context: float) -> Work:
        """Return one layer's attention of one new token each."""
        seen = num_sequences * self._window(context)
        return self.attention(num_sequences, seen, seen)

    def prefill_attention(self, num_prompts: float, length: float, chunk: float | None = None) -> Work:
        """Return one layer's attention of whole prompts, each in chunks of so many tokens; None: in one."""
        chunk = min(chunk or length, length)
        window = self._window(length)
        seen = num_prompts * (window * (window + 1) / 2 + (length - window) * window)  # fewer until a window is full
        read = num_prompts * (length / chunk + 1) / 2 * length
        return self.attention(num_prompts * length, seen, min(read, seen))

    def output_projection(self, num_tokens: float) -> Work:
        """Return one layer's output projection."""
        return self._linear(self.output_values, num_tokens, self.formats.matrices)

    def router(self, num_tokens: float) -> Work:
        """Return one layer's choice of experts."""
        return self._linear(self.router_values, num_tokens, self.formats.of_routers)

    def experts(self, num_tokens: float, distinct: float | None = None) -> Work:
        """Return one layer's experts; `distinct` is how many are used, None: as many as on average."""
        shape = self.shape
        used = expected_distinct(shape.num_experts, shape.top_k, num_tokens) if distinct is None else distinct
        pairs = num_tokens * shape.top_k
        return Work(
            "experts",
            self.formats.matrices,
            used * self.expert_bytes,
            2.0 * pairs * self.expert_values,
            pairs / used if used else 0.0,
            self.expert_values,
        )

    def dense(self, num_tokens: float) -> Work:
        """Return the feed-forward network of one layer without experts: one expert that all tokens use."""
        num_bytes = self.dense_values * self.formats.weight_bytes
        flops = 2.0 * num_tokens * self.dense_values
        return Work("experts", self.formats.matrices, num_bytes, flops, num_tokens, self.dense_values)

    def head(self, num_sampled: float) -> Work:
        """Return the output projection to the vocabulary."""
        return self._linear(self.shape.vocab_size * self.shape.hidden_size, num_sampled, self.formats.embeddings)

    def feed_forward(self, num_tokens: float, distinct: float | None = None) -> list[tuple[int, Work]]:
        """Return what follows attention's output projection: (layers that have it, work in one of them).

        `distinct` is how many experts of a layer are used, None: as many as on average. Only the decoder is counted.
        """
        experts, shape = self.experts(num_tokens, distinct), self.shape
        num_moe = shape.num_layers - len(shape.dense_layers) if shape.num_experts else 0
        moe = [(num_moe, self.router(num_tokens)), (num_moe, experts)]
        dense = [(shape.num_layers - num_moe, self.dense(num_tokens))]
        return [(count, work) for count, work in moe + dense if count]

    def row_operations(self, num_tokens: float) -> Work:
        """Return what passes through a layer's operations on rows: norms, rotation, residuals, storing K and V."""
        shape = self.shape
        qkv = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
        num_bytes = num_tokens * (8 * shape.hidden_size + 2 * qkv) * self.formats.activation_bytes
        return Work("rows", "float32", num_bytes, 0.0, num_tokens, shape.hidden_size)

    def sampling(self, num_sampled: float) -> Work:
        """Return the choice of tokens from their logits, which are float32, at a temperature."""
        vocab_size = self.shape.vocab_size
        return Work("sampling", "float32", 4.0 * num_sampled * vocab_size, 0.0, num_sampled, vocab_size)

    def activation_bytes(self, num_tokens: float) -> float:
        """Return what so many tokens need between operations, at the widest place of a layer."""
        shape = self.shape
        attention = 2 * shape.hidden_size + shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
        pairs = max(shape.top_k, 1)
        experts = 2 * shape.hidden_size + pairs * (3 * shape.intermediate_size + shape.hidden_size)
        return num_tokens * max(attention, experts) * self.formats.activation_bytes

    def _window(self, context: float) -> float:
        return min(context, self.shape.sliding_window or context)

    def _linear(self, values: int, num_tokens: float, dtype: str) -> Work:
        num_bytes = values * bits_per_value(dtype) / 8
        return Work("linear", dtype, num_bytes, 2.0 * num_tokens * values, num_tokens, values)
