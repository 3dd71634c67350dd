"""The bytes and operations of each stage of a model, from its shape and the formats of its weights.

A stage becomes `KernelWork`: bytes of weights or of keys and values, each read once, and operations. Activations within
a stage are left out; `row_operations` has those between stages. Knows no machine. The stages are those of MoE-Lightning
4.1: pre-attention (QKV), attention, post-attention (output projection, router, experts), and the head. A stage is the
average over layers, recurrent layers included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from moeflow.core.model_config import ModelConfig
from moeflow.core.recurrent_config import MixerConfig
from moeflow.kernels.weight_format import BITS_PER_VALUE, PLANAR_BITS, LayerFormats
from moeflow.planner.costs.rank_shares import WHOLE, RankShares

FLOAT16_BITS = 16.0
FLOAT32_BYTES = 4  # of a norm's weight, in every format


@dataclass(frozen=True, slots=True)
class KernelWork:
    """A computation: its kernel, the bytes that it reads and its operations."""

    kernel: str  # one of core.hardware.KERNELS
    dtype: str  # of these bytes
    num_bytes: float
    num_flops: float
    rows: float  # per weight; for attention, queries that share K and V
    values: int  # of a matrix (an expert's added up), a row, or, for attention, of K and V at one position

    @property
    def intensity(self) -> float:
        """Operations a byte: I of MoE-Lightning, definition 3.1."""
        return self.num_flops / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """The formats of a model's weights, keys and values."""

    matrices: str
    embeddings: str
    kv: str
    activation_bytes: int = 4  # of one value between operations
    routers: str | None = None  # None: as matrices
    head: str | None = None  # of the output projection; None: as embeddings
    layer_table: str | None = None  # of the table that embeds tokens for each layer; None: as embeddings
    is_table_on_disk: bool = False  # in the file that weights are mapped from: a token reads one row of it
    layers: tuple[LayerFormats, ...] = ()  # of each layer's matrices instead of `matrices`; empty: all have that
    is_wide: bool = False  # whether integers meet activations of 16 bits
    is_planar: bool = False  # as kernels of a GPU read them, where they do

    def bits(self, dtype: str) -> float:
        """Return the bits of a weight, its share of a scale included."""
        return (self.is_planar and PLANAR_BITS.get(dtype)) or bits_per_value(dtype)

    @property
    def of_up_projections(self) -> str:
        """The format of latent attention's matrices from latents to keys and values."""
        if bits_per_value(self.matrices) == FLOAT16_BITS:
            return self.matrices
        return "float32" if self.matrices == "float32" or self.is_wide else "bfloat16"

    @property
    def of_routers(self) -> str:
        """The format of routers."""
        return self.routers or self.matrices

    @property
    def of_layer_table(self) -> str:
        """The format of the table that embeds tokens for each layer."""
        return self.layer_table or self.embeddings

    @property
    def outside_layers(self) -> str:
        """The format of the matrix from token embeddings to layers' inputs."""
        return self.of_routers if self.layers else self.matrices

    @property
    def of_head(self) -> str:
        """The format of the output projection."""
        return self.head or self.embeddings

    @property
    def weight_bytes(self) -> float:
        """Bytes of one value of a matrix."""
        return self.bits(self.matrices) / 8

    def bytes_of(self, *parts: str, layers: Sequence[int] | None = None) -> float:
        """Return the bytes of a value in parts of layers (fields of `LayerFormats`), on average; None: of all layers.

        Parts count alike: they are of one size.
        """
        if not self.layers:
            return self.weight_bytes
        numbers = range(len(self.layers)) if layers is None else layers
        bits = [self.bits(self.layers[number].of(part)) for number in numbers for part in parts]
        return sum(bits) / len(bits) / 8 if bits else self.weight_bytes


def bits_per_value(dtype: str) -> float:
    """Return the bits of a value, its share of a scale included."""
    return FLOAT16_BITS if dtype == "float16" else BITS_PER_VALUE[dtype]


def expected_distinct(num_experts: int, top_k: int, num_tokens: float) -> float:
    """Return the experts of a layer that so many tokens reach on average, if routers choose evenly."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens) if num_experts else 0.0


@dataclass(frozen=True)
class ModelCosts:
    """The costs of one model in given formats. Searches ask often, so fixed sums are cached."""

    shape: ModelConfig
    formats: Formats

    @cached_property
    def num_moe_layers(self) -> int:
        """Layers with experts, those of an encoder included."""
        return self.shape.num_moe_layers

    @property
    def num_dense_layers(self) -> int:
        """Layers with a plain feed-forward network, those of an encoder included."""
        return self.shape.num_layers + self.shape.num_encoder_layers - self.num_moe_layers

    @cached_property
    def qkv_values(self) -> int:
        """Weights of one layer's query, key and value projections."""
        mixer = self._mixer
        of_mixer = 0 if mixer is None else self.shape.hidden_size * mixer.in_features
        return self._of_layers(self.shape.attention_input_values, of_mixer)

    @cached_property
    def output_values(self) -> int:
        """Weights of one layer's output projection."""
        mixer = self._mixer
        return self.shape.hidden_size * self._of_layers(
            self.shape.attended_size, 0 if mixer is None else mixer.out_features
        )

    @property
    def _mixer(self) -> MixerConfig | None:
        return None if self.shape.recurrent is None else self.shape.recurrent.mixer

    def _of_layers(self, of_attention: int, of_mixer: int) -> int:
        """Return the average over attention layers and recurrent layers."""
        num_layers, num_attending = self.shape.num_layers, len(self.shape.attention_layers)
        if num_attending == num_layers:
            return of_attention
        return round((num_attending * of_attention + (num_layers - num_attending) * of_mixer) / num_layers)

    @property
    def expert_values(self) -> int:
        """Weights of one expert."""
        return self.shape.feed_forward.num_matrices * self.shape.hidden_size * self.shape.feed_forward.intermediate_size

    @cached_property
    def dense_values(self) -> int:
        """Weights of the feed-forward network of one layer that has no experts, on average."""
        return self._dense_values(range(self.shape.num_layers))

    def _dense_values(self, layers: Sequence[int]) -> int:
        """Return the same of some layers."""
        shape, dense = self.shape, set(layers).difference(self.shape.moe_layers)
        num_units = (
            sum(map(shape.dense_width_of, dense)) // len(dense) if shape.feed_forward.wide_layers else shape.dense_width
        )
        return shape.feed_forward.num_matrices * shape.hidden_size * num_units

    @property
    def dense_width(self) -> int:
        """Hidden units of that network, on average."""
        return self.dense_values // (self.shape.feed_forward.num_matrices * self.shape.hidden_size)

    @property
    def shared_values(self) -> int:
        """Weights of a layer's shared expert, which all tokens use."""
        return (
            self.shape.feed_forward.num_matrices
            * self.shape.hidden_size
            * self.shape.feed_forward.shared_intermediate_size
        )

    @property
    def router_values(self) -> int:
        """Weights of one router, and of a shared expert's gate."""
        return self.shape.hidden_size * (self.shape.routing.num_experts + self.shape.feed_forward.has_shared_gate)

    @cached_property
    def expert_bytes(self) -> float:
        """One expert, on average."""
        return self._network_bytes(self.expert_values, self._moe_layers(range(self.shape.num_layers)))

    @cached_property
    def largest_expert_bytes(self) -> float:
        """An expert in the layer where it takes most."""
        layers = self._moe_layers(range(self.shape.num_layers)) if self.formats.layers else [0]
        return max(self._network_bytes(self.expert_values, [layer]) for layer in layers)

    @property
    def experts_bytes(self) -> float:
        """All experts of all layers."""
        return self.num_moe_layers * self.shape.routing.num_experts * self.expert_bytes

    @cached_property
    def movable_bytes(self) -> float:
        """The experts of all layers, and the networks of layers without any: a pipeline can stream them."""
        return self.experts_bytes + self.num_dense_layers * self.dense_values * self.formats.weight_bytes

    @property
    def routed_bytes(self) -> float:
        """A token's input of a layer's experts, and its router's choice: 64-bit numbers and float32 weights."""
        shape = self.shape
        return shape.hidden_size * self.formats.activation_bytes + shape.routing.top_k * (8 + FLOAT32_BYTES)

    @property
    def summed_bytes(self) -> float:
        """A token's sum over experts that the host computes, in float32, and its row."""
        return self.shape.hidden_size * FLOAT32_BYTES + 8.0

    def _moe_layers(self, layers: Sequence[int]) -> list[int]:
        """Return the layers with experts among some of the decoder's layers."""
        return sorted(set(layers).intersection(self.shape.moe_layers))

    def _network_bytes(self, values: int, layers: Sequence[int], *, is_shared: bool = False) -> float:
        """Return the bytes of an expert, or dense network, of so many values, on the average of some layers."""
        num_ups = self.shape.feed_forward.num_matrices - 1
        up, down = ("shared_up", "shared_down") if is_shared else ("up", "down")
        per_value = num_ups * self.formats.bytes_of(up, layers=layers) + self.formats.bytes_of(down, layers=layers)
        return values / (num_ups + 1) * per_value

    def _qkv_bytes(self, layers: Sequence[int], queries: float = 1.0, keys: float = 1.0) -> float:
        """Return the bytes of the query, key and value projection, or shares of it, on the average of some layers."""
        shape, formats = self.shape, self.formats
        if shape.recurrent is not None:  # in one process
            return self.qkv_values * formats.bytes_of("q_proj", layers=layers)
        if shape.attention.latent is not None:
            kept, up = shape.hidden_size * shape.attention.head_dim, shape.attention.latent_values
            q_bytes = (self.qkv_values - kept - up) * formats.bytes_of("q_proj", layers=layers)
            up_bytes = up * self.formats.bits(formats.of_up_projections) / 8
            return queries * (q_bytes + up_bytes) + keys * kept * formats.bytes_of("k_proj", layers=layers)
        total = 0.0
        of_heads = Counter(map(shape.attention.heads_of, layers)) or {shape.attention.heads_of(0): 1}
        for heads, count in of_heads.items():
            values = ("k_proj", "v_proj")[: heads.num_key_projections]
            queries_bytes = shape.attention.num_heads * queries * formats.bytes_of("q_proj", layers=layers)
            keys_bytes = len(values) * heads.num_kv_heads * keys * formats.bytes_of(*values, layers=layers)
            total += count * heads.head_dim * (queries_bytes + keys_bytes)
        return shape.hidden_size * total / max(len(layers), 1)

    @cached_property
    def _all_qkv_bytes(self) -> float:
        return self._qkv_bytes(range(self.shape.num_layers))

    @cached_property
    def layers_bytes(self) -> float:
        """All layers, experts included."""
        return self._layers_bytes(WHOLE)

    @cached_property
    def embedding_bytes(self) -> float:
        """Token embeddings and output projection, which may be one."""
        return self._tables_bytes(head=1.0)

    def _tables_bytes(self, head: float) -> float:
        """Return token embeddings, learned positions and so much of an output projection of its own."""
        values = self.shape.vocab_size * self.shape.hidden_size
        own = 0.0 if self.shape.embeddings.tie_word_embeddings else head * self.formats.bits(self.formats.of_head)
        positions = self.shape.embeddings.num_learned_positions * self.shape.hidden_size * FLOAT32_BYTES
        of_tokens = values * (self.formats.bits(self.formats.embeddings) + own) / 8
        making = (
            self.shape.num_layers * self.shape.layer_input_values // 3 * self.formats.bits(self.formats.outside_layers)
        )
        return of_tokens + positions + self.held_table_bytes + making / 8

    @property
    def layer_table_bytes(self) -> float:
        """The table that embeds tokens for each layer."""
        return self.shape.layer_table_values * self.formats.bits(self.formats.of_layer_table) / 8

    @property
    def held_table_bytes(self) -> float:
        """The bytes of this table in memory."""
        return 0.0 if self.formats.is_table_on_disk else self.layer_table_bytes

    @cached_property
    def model_bytes(self) -> float:
        """All weights; norms over single heads and biases but experts' are left out (under 0.1%)."""
        return self.bytes_of(WHOLE)

    @cached_property
    def encoder_bytes(self) -> float:
        """The encoder's layers of an encoder-decoder, and the decoder's attention over encoded tokens."""
        shape, encoder = self.shape, self.shape.encoder
        if encoder is None:
            return 0.0
        num_dense = len(encoder.dense_layers) if shape.routing.num_experts else encoder.num_layers
        num_moe = encoder.num_layers - num_dense
        attention = (encoder.num_layers + shape.num_layers) * (self.qkv_values + self.output_values)
        routers = num_moe * self.router_values * self.formats.bits(self.formats.of_routers) / 8
        norms = (2 * encoder.num_layers + shape.num_layers + 1) * shape.hidden_size * FLOAT32_BYTES
        experts = num_moe * shape.routing.num_experts * self.expert_bytes
        return (attention + num_dense * self.dense_values) * self.formats.weight_bytes + routers + norms + experts

    def bytes_of(self, shares: RankShares) -> float:
        """Return the weights of a rank that has these shares.

        Whole on each rank are an encoder, and an output projection that equals the token embeddings.
        """
        tables = self._tables_bytes(shares.head) if shares.has_ends else 0.0
        num_norms = self.shape.num_norms * len(self._layers_of(shares)) + 1
        norm_bytes = num_norms * self.shape.hidden_size * FLOAT32_BYTES
        return self._layers_bytes(shares) + tables + norm_bytes + self.encoder_bytes

    def _layers_of(self, shares: RankShares) -> range:
        return range(self.shape.num_layers) if shares.layers is None else shares.layers

    def _layers_bytes(self, shares: RankShares) -> float:
        shape, layers = self.shape, self._layers_of(shares)
        moe = self._moe_layers(layers)
        dense = sorted(set(layers).difference(moe))
        outputs = self.output_values * shares.outputs * self.formats.bytes_of("o_proj", layers=layers)
        attention = len(layers) * (self._qkv_bytes(layers, shares.queries, shares.keys) + outputs)
        if shape.recurrent is not None:
            attention += len(shape.recurrent.layers) * shape.recurrent.mixer.small_values * FLOAT32_BYTES
        networks = len(dense) * self._network_bytes(self._dense_values(dense), dense) * shares.dense if dense else 0.0
        input_values = len(layers) * shape.layer_input_values // 3 * 2
        networks += input_values * self.formats.bytes_of("layer_input", layers=layers)
        routers = len(moe) * self.router_values * self.formats.bits(self.formats.of_routers) / 8
        experts = len(moe) * shape.routing.num_experts * self._network_bytes(self.expert_values, moe) * shares.experts
        biases = len(moe) * shape.routing.num_experts * shape.num_expert_biases * FLOAT32_BYTES  # a rank has all
        shared = len(moe) * self._network_bytes(self.shared_values, moe, is_shared=True) * shares.shared
        return attention + networks + routers + experts + biases + shared

    @property
    def kv_layer_bytes(self) -> float:
        """Keys and values of one token in one layer."""
        return self.kv_bytes / max(self.shape.num_layers, 1)

    @cached_property
    def kv_bytes(self) -> float:
        """Keys and values of one token in all layers."""
        return self.shape.kv_bytes_per_token(self.formats.kv)

    @cached_property
    def most_kv_layer_bytes(self) -> float:
        """Keys and values of one token in the layer that has most."""
        return self.shape.most_kv_bytes_per_token(self.formats.kv)

    def kv_bytes_of(self, layer: int | None) -> float:
        """Return the keys and values of one token in a layer; None: on the average of all."""
        return self.kv_layer_bytes if layer is None else self.shape.kv_bytes_per_token(self.formats.kv, layer)

    @cached_property
    def projected_size(self) -> float:
        """The projected values of a token's queries, keys and values, on the average of all layers."""
        layers = self.shape.attention_layers
        return sum(map(self.projected_size_of, layers)) / max(len(layers), 1)

    def projected_size_of(self, layer: int | None) -> float:
        """Return the same of a layer; None: on the average of all."""
        if layer is None:
            return self.projected_size
        heads = self.shape.attention.heads_of(layer)
        return (self.shape.attention.num_heads + heads.num_key_projections * heads.num_kv_heads) * heads.head_dim

    def attended_size_of(self, layer: int | None) -> float:
        """Return the width of attention's output in a layer; None: on the average of all."""
        shape = self.shape
        return (
            shape.attended_size if layer is None else shape.attention.attended_size_of(shape.attention.heads_of(layer))
        )

    @cached_property
    def _attended_bytes(self) -> int:
        return self.shape.attended_bytes_per_token(self.formats.kv)

    @cached_property
    def _sliding_windows(self) -> Counter[int | None]:
        return self.shape.sliding_windows

    def pre_attention(self, num_tokens: float) -> KernelWork:
        """Return one layer's query, key and value projection."""
        return self._matrix(self.qkv_values, num_tokens, self._all_qkv_bytes)

    def attention(self, num_tokens: float, num_seen: float, num_read: float, num_states: float = 0.0) -> KernelWork:
        """Return one layer's attention, softmax part (thesis 4.25 without projections).

        num_seen: positions that queries attend to, summed over all tokens.
        num_read: positions whose K and V are read, once for all queries of a sequence.
        num_states: sequences whose states are read and written.
        """
        shape, num_layers = self.shape, max(self.shape.num_layers, 1)
        num_bytes = num_read * self._attended_bytes / num_layers
        widths = (
            shape.attention.num_heads * (shape.attention.head_dim + shape.attention.latent_dim)
            if shape.attention.latent
            else 2 * shape.attended_size
        )
        num_flops = 2.0 * widths * num_seen
        if shape.recurrent is not None:
            share = len(shape.recurrent.layers) / num_layers
            num_bytes += num_states * 2 * shape.state_bytes / num_layers
            num_flops += share * (shape.recurrent.mixer.flops_per_token * num_tokens - num_flops)
        queries = (
            shape.attention.num_heads
            / shape.attention.num_kv_heads
            * max(num_seen / num_read if num_read else 1.0, 1.0)
        )
        return KernelWork(
            "attention",
            self.formats.kv,
            num_bytes,
            num_flops,
            queries,
            shape.attention.num_kv_heads
            * (shape.attention.head_dim + (shape.attention.latent_dim or shape.attention.head_dim)),
        )

    def decode_attention(self, num_sequences: float, context: float) -> KernelWork:
        """Return one layer's attention of one new token each, on average over layers."""
        seen = num_sequences * self._average(lambda window: window, context)
        return self.attention(num_sequences, seen, seen, num_sequences)

    def seen_share(self, context: float) -> float:
        """Return the share of a context that a query sees, on average over layers: windows hide the rest."""
        return self._average(lambda window: window, context) / context if context else 1.0

    def prefill_attention(self, num_prompts: float, length: float, chunk: float | None = None) -> KernelWork:
        """Return one layer's attention of whole prompts, each in chunks of so many tokens; None: in one.

        Where layers differ it is their average.
        """
        chunk = min(chunk or length, length)
        # Fewer until a window is full.
        seen = num_prompts * self._average(lambda it: it * (it + 1) / 2 + (length - it) * it, length)
        read = num_prompts * (length / chunk + 1) / 2 * length
        return self.attention(num_prompts * length, seen, min(read, seen), num_prompts * length / chunk)

    def output_projection(self, num_tokens: float) -> KernelWork:
        """Return one layer's output projection."""
        num_bytes = self.output_values * self.formats.bytes_of("o_proj")
        return self._matrix(self.output_values, num_tokens, num_bytes)

    def router(self, num_tokens: float) -> KernelWork:
        """Return one layer's router."""
        return self._linear(self.router_values, num_tokens, self.formats.of_routers)

    def experts(self, num_tokens: float, distinct: float | None = None) -> KernelWork:
        """Return one layer's experts; `distinct` is the number of used ones, None: as on average."""
        shape = self.shape
        used = (
            expected_distinct(shape.routing.num_experts, shape.routing.top_k, num_tokens)
            if distinct is None
            else distinct
        )
        pairs = num_tokens * shape.routing.top_k
        return KernelWork(
            "experts",
            self.formats.matrices,
            used * self.expert_bytes,
            2.0 * pairs * self.expert_values,
            pairs / used if used else 0.0,
            self.expert_values,
        )

    def dense(self, num_tokens: float) -> KernelWork:
        """Return the feed-forward network of one layer without experts: one expert that all tokens use."""
        layers = range(self.shape.num_layers)
        num_bytes = self._network_bytes(self.dense_values, sorted(set(layers).difference(self._moe_layers(layers))))
        return self._network(self.dense_values, num_tokens, num_bytes)

    def shared(self, num_tokens: float) -> KernelWork:
        """Return one layer's shared expert: one that all tokens use."""
        num_bytes = self._network_bytes(self.shared_values, self.shape.moe_layers, is_shared=True)
        return self._network(self.shared_values, num_tokens, num_bytes)

    def _network(self, values: int, num_tokens: float, num_bytes: float) -> KernelWork:
        return KernelWork("experts", self.formats.matrices, num_bytes, 2.0 * num_tokens * values, num_tokens, values)

    def until_experts(self, num_tokens: float) -> list[KernelWork]:
        """Return the works between a layer's attention and its chosen experts."""
        shared = [self.shared(num_tokens)] if self.shape.feed_forward.shared_intermediate_size else []
        return [self.output_projection(num_tokens), self.router(num_tokens), *shared]

    def head(self, num_sampled: float) -> KernelWork:
        """Return the output projection to the vocabulary."""
        return self._linear(self.shape.vocab_size * self.shape.hidden_size, num_sampled, self.formats.of_head)

    def feed_forward(self, num_tokens: float, distinct: float | None = None) -> list[tuple[int, KernelWork]]:
        """Return the works after attention's output projection: (layers that have it, work in one of them).

        `distinct` is the number of used experts of a layer, None: as on average. Only the decoder is counted.
        """
        experts, shape = self.experts(num_tokens, distinct), self.shape
        num_moe = len(shape.moe_layers)
        moe = [(num_moe, work) for work in [*self.until_experts(num_tokens)[1:], experts]]
        dense = [(shape.num_layers - num_moe, self.dense(num_tokens))]
        inputs = [(shape.num_layers if shape.embeddings.layer_embeddings else 0, self.layer_input(num_tokens))]
        return [(count, work) for count, work in moe + dense + inputs if count]

    def pass_works(
        self, num_tokens: float, attention: KernelWork | None, num_sampled: float, distinct: float | None = None
    ) -> list[tuple[int, KernelWork]]:
        """Return the works of a pass: (how many times, work). None: attention runs elsewhere, or `distinct` is average.

        Operations on rows and the choice of tokens are not included: kernels of devices fuse them.
        """
        stages = (self.pre_attention(num_tokens), attention, self.output_projection(num_tokens))
        works = [(self.shape.num_layers, work) for work in stages if work is not None]
        return [*works, *self.feed_forward(num_tokens, distinct), (1, self.head(num_sampled))]

    def host_works(self, num_tokens: float, num_sampled: float) -> list[tuple[int, KernelWork]]:
        """Return the works that a pass has on a host only: operations on rows, and the choice of tokens."""
        return [(self.shape.num_layers, self.row_operations(num_tokens)), (1, self.sampling(num_sampled))]

    def layer_input(self, num_tokens: float) -> KernelWork:
        """Return the matrices from token embeddings to one layer's own input, and from this to the layer."""
        values = self.shape.layer_input_values
        making = self.formats.bits(self.formats.outside_layers) / 8
        num_bytes = values / 3 * (making + 2 * self.formats.bytes_of("layer_input"))
        return self._matrix(values, num_tokens, num_bytes)

    def row_operations(self, num_tokens: float) -> KernelWork:
        """Return a layer's operations on rows: norms, rotation, residuals, storing K and V."""
        shape = self.shape
        qkv = self.qkv_values // shape.hidden_size
        num_bytes = num_tokens * (8 * shape.hidden_size + 2 * qkv) * self.formats.activation_bytes
        return KernelWork("rows", "float32", num_bytes, 0.0, num_tokens, shape.hidden_size)

    def sampling(self, num_sampled: float) -> KernelWork:
        """Return the choice of tokens from float32 logits at a temperature."""
        vocab_size = self.shape.vocab_size
        return KernelWork("sampling", "float32", 4.0 * num_sampled * vocab_size, 0.0, num_sampled, vocab_size)

    def activation_bytes(self, num_tokens: float) -> float:
        """Return the activation bytes of so many tokens at the widest place of a layer."""
        return num_tokens * self._widest_values * self.formats.activation_bytes

    def pass_activation_bytes(self, num_tokens: int, largest: int) -> float:
        """Return the activation bytes of a pass in micro-batches, whose largest has so many tokens.

        Every token keeps its input of a layer and its attention result; at the end, all are put in order.
        """
        kept = self.shape.hidden_size + max(self.shape.attended_size, self.shape.hidden_size)
        return num_tokens * kept * self.formats.activation_bytes + self.activation_bytes(largest)

    @cached_property
    def _widest_values(self) -> int:
        """Values of a token at the widest place of a layer."""
        shape = self.shape
        widest = 0 if self._mixer is None else self._mixer.in_features
        attention = 2 * shape.hidden_size + max(shape.qkv_size, widest)
        pairs = max(shape.routing.top_k, 1)
        return max(
            attention, 2 * shape.hidden_size + pairs * (3 * shape.feed_forward.intermediate_size + shape.hidden_size)
        )

    def _average(self, of_window: Callable[[float], float], context: float) -> float:
        """Return the average over layers of a function of the tokens that a query sees."""
        counts = self._sliding_windows
        total = sum(count * of_window(min(context, window or context)) for window, count in counts.items())
        return total / counts.total() if counts.total() else of_window(context)

    def _matrix(self, values: int, num_tokens: float, num_bytes: float) -> KernelWork:
        """Return the work of a layer's matrix."""
        return KernelWork("linear", self.formats.matrices, num_bytes, 2.0 * num_tokens * values, num_tokens, values)

    def _linear(self, values: int, num_tokens: float, dtype: str) -> KernelWork:
        num_bytes = values * self.formats.bits(dtype) / 8
        return KernelWork("linear", dtype, num_bytes, 2.0 * num_tokens * values, num_tokens, values)
