"""An encoder-decoder: an encoder that sees all of an input, and a decoder that also attends to the encoded input.

A request is one sequence: its input, filled up to whole KV blocks, and then what the decoder begins with and continues.
In each decoder layer, the blocks of the input hold its keys and values of the encoded input. The encoding pass computes
them once; every later pass reads them. The decoder's own positions begin
behind them, from 0 on. (Attention as in T5, 1910.10683: relative positions, scores that are not scaled, no biases.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.attention.attention import attend, write_kv
from moeflow.kernels.attention.attention_metadata import AttentionMetadata, SequenceSpan
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.cpu.stages import MoEStage
from moeflow.kernels.embedding import embedding
from moeflow.kernels.linear import linear
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.classifier import Classifier
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.mlp import MLP, FusedMLP
from moeflow.models.layers.moe import Given, MoE
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.relative_bias import RelativeBias
from moeflow.models.layers.weight_allocator import WeightAllocator, whole

_SCALE = 1.0  # of scores
_TABLE = "shared.weight"  # of embeddings
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of the table, in old files
_BLOCK_SIZE = 16  # of what the encoder attends to


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Which layer is being made."""

    layer_idx: int
    is_encoder: bool


MakeNetwork = Callable[[ModelConfig, WeightAllocator, LayerPlace], MLP | FusedMLP | MoE]


class EncoderDecoderLM:
    """What the model files build, with a decoder or without. Weights are uninitialised until a loader fills
    `named_weights`.
    """

    tells_inputs = False  # see `CausalLM`
    shares_head = False
    packed_layers: Final = None
    embedding_names = (_TABLE, "lm_head.weight", *_COPIES)
    copies: Final[Mapping[str, str]] = dict.fromkeys(_COPIES, _TABLE)  # optional tensors: each equals the one it names

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, make_network: MakeNetwork) -> None:
        assert config.encoder is not None
        self.config = config
        self.dtype = allocator.dtype  # of hidden states
        self.device = allocator.device
        self.embed_tokens = allocator.matrix("embeddings", config.vocab_size, config.hidden_size)
        self._encoder = _EncoderStack(config, allocator, config.encoder.num_layers, make_network)
        self._decoder = None if config.is_encoder_only else _Decoder(config, allocator, make_network)
        self.classifier = Classifier(allocator, config.hidden_size, len(config.labels)) if config.labels else None
        self._has_own_head = not config.embeddings.tie_word_embeddings
        self.lm_head = (
            allocator.matrix("embeddings", config.vocab_size, config.hidden_size)
            if self._has_own_head
            else self.embed_tokens
        )

    @property
    def encoder_layers(self) -> tuple[_StackLayer, ...]:
        """The encoder's, in order."""
        return self._encoder.layers

    @property
    def decoder_layers(self) -> tuple[_StackLayer, ...]:
        """The decoder's, in order; none if there is no decoder."""
        return () if self._decoder is None else self._decoder.layers

    def choose_by(self, given: Sequence[Given]) -> None:
        """See `CausalLM`."""
        for (_, block), choice in zip(self.moe_blocks(), given, strict=True):
            block.given = choice

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Return what goes into the first layer. Shapes: token_ids [T] int64 -> [T, H]."""
        return embedding(token_ids, self.embed_tokens)

    @torch.inference_mode()
    def encode(self, token_ids: Tensor) -> Tensor:
        """Return what the encoder alone makes of one input. Shapes: token_ids [T] int64, T at least 1 -> [T, H]."""
        return self._encoder(self.embed(token_ids), [len(token_ids)])

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Return the hidden states after the final norm; those of inputs are the encoder's, and of their filling 0.

        Writes keys and values of every token to `context.kv`.

        Shapes: token_ids [T] int64 -> [T, H].
        """
        parts = _Parts.of(context)
        hidden = self.embed(token_ids)
        out = torch.zeros_like(hidden)
        if len(parts.input_rows):
            encoded = self._encoder(hidden[parts.input_rows], parts.input_lengths)
            if self._decoder is not None:
                self._decoder.store_input(encoded, context, parts.input_rows)
            out[parts.input_rows] = encoded
        if len(parts.output_rows) and self._decoder is not None:
            out[parts.output_rows] = self._decoder(hidden[parts.output_rows], context, parts)
        return out

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, H] of the decoder from a pass -> [S, V] float32."""
        return linear(hidden * self.config.embeddings.logit_scale, self.lm_head).float()

    def close(self) -> None:
        """End what the model has running: nothing."""

    def moe_blocks(self) -> Iterator[tuple[str, MoE]]:
        """Yield (prefix of its checkpoint names, block) of the layers with experts, in the order of a pass."""
        for name, stack in self._stacks():
            for layer_idx, layer in enumerate(stack.layers):
                if isinstance(layer.mlp, MoE):
                    yield layer.network_prefix(f"{name}.block.{layer_idx}"), layer.mlp

    def named_weights(self) -> Iterator[tuple[str, Destination]]:
        """Yield every (checkpoint name, where its tensor goes)."""
        yield _TABLE, whole(self.embed_tokens)
        for name, stack in self._stacks():
            yield from stack.named_weights(name)
        if self._has_own_head:
            yield "lm_head.weight", whole(self.lm_head)
        if self.classifier is not None:
            yield from self.classifier.named_weights("score")

    def _stacks(self) -> list[tuple[str, _Stack]]:
        stacks: list[tuple[str, _Stack]] = [("encoder", self._encoder)]
        return stacks if self._decoder is None else [*stacks, ("decoder", self._decoder)]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Which tokens of a pass are input, and which the decoder's; and what these see."""

    input_rows: Tensor  # [I] int64
    input_lengths: list[int]  # of each input in the pass
    output_rows: Tensor  # [O] int64
    own: AttentionMetadata  # the decoder's tokens over their own sequence
    over_input: AttentionMetadata  # the same tokens over their input

    @classmethod
    def of(cls, context: ForwardContext) -> _Parts:
        metadata, device = context.attention, context.attention.slots.device
        input_rows: list[int] = []
        input_lengths: list[int] = []
        output_rows: list[int] = []
        outputs: list[_Output] = []
        for span, length in zip(metadata.spans, context.num_encoder_tokens, strict=True):
            if span.start == 0:
                assert span.num_tokens >= length, "an input is encoded whole"
                input_rows += range(span.first_token, span.first_token + length)
                input_lengths.append(length)
            output = _Output.of(span, length, metadata.block_size)
            if output.num_tokens:
                end = span.first_token + span.num_tokens
                output_rows += range(end - output.num_tokens, end)
                outputs.append(output)
        num_tokens = [output.num_tokens for output in outputs]
        own = AttentionMetadata.build(
            starts=[output.start for output in outputs],
            num_tokens=num_tokens,
            block_ids=[output.own_blocks for output in outputs],
            block_size=metadata.block_size,
            device=device,
        )
        over_input = AttentionMetadata.over(
            lengths=[output.input_length for output in outputs],
            num_tokens=num_tokens,
            block_ids=[output.input_blocks for output in outputs],
            block_size=metadata.block_size,
            device=device,
        )
        input_index, output_index = (
            torch.tensor(it, dtype=torch.int64, device=device) for it in (input_rows, output_rows)
        )
        return cls(input_index, input_lengths, output_index, own, over_input)


@dataclass(frozen=True, slots=True)
class _Output:
    """The decoder's tokens of one sequence in a pass, numbered from 0 behind its input."""

    start: int
    num_tokens: int
    own_blocks: Sequence[int]
    input_length: int
    input_blocks: Sequence[int]

    @classmethod
    def of(cls, span: SequenceSpan, input_length: int, block_size: int) -> _Output:
        num_blocks = -(-input_length // block_size)
        begin = num_blocks * block_size
        return cls(
            start=max(span.start - begin, 0),
            num_tokens=max(span.stop - max(span.start, begin), 0),
            own_blocks=span.block_ids[num_blocks:],
            input_length=input_length,
            input_blocks=span.block_ids[:num_blocks],
        )


class _SelfAttention:
    """Attention of a layer over its own sequence."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator) -> None:
        self._heads = heads, head_dim = config.attention.num_heads, config.attention.head_dim
        size = heads * head_dim
        self.qkv_proj = Linear(allocator, config.hidden_size, {"q": size, "k": size, "v": size})
        self.o_proj = Linear(allocator, size, {"o": config.hidden_size})
        self.norm = Norm.of(config, allocator)

    def __call__(self, hidden: Tensor, blocks: KVBlocks, metadata: AttentionMetadata, bias: Tensor) -> Tensor:
        """Store keys and values, and attend. Shapes: hidden [T, H] -> [T, heads * D], for `o_proj`."""
        q, k, v = (part.view(-1, *self._heads) for part in self.qkv_proj.after_norm(hidden, self.norm).chunk(3, dim=1))
        write_kv(k, v, blocks, metadata.slots)
        return attend(q, blocks, metadata, Scores(scale=_SCALE, bias=bias))

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination); `prefix` is that of the layer's part."""
        yield from self.qkv_proj.named_weights(f"{prefix}.SelfAttention")
        yield from self.o_proj.named_weights(f"{prefix}.SelfAttention")
        yield from self.norm.named_weights(f"{prefix}.layer_norm")


class _CrossAttention:
    """Attention of a decoder layer over the encoded input."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator) -> None:
        self._heads = heads, head_dim = config.attention.num_heads, config.attention.head_dim
        size = heads * head_dim
        self.q_proj = Linear(allocator, config.hidden_size, {"q": size})
        self.kv_proj = Linear(allocator, config.hidden_size, {"k": size, "v": size})
        self.o_proj = Linear(allocator, size, {"o": config.hidden_size})
        self.norm = Norm.of(config, allocator)

    def store(self, encoded: Tensor, blocks: KVBlocks, slots: Tensor) -> None:
        """Store keys and values of encoded tokens. Shapes: encoded [I, H], slots [I]."""
        k, v = (part.view(-1, *self._heads) for part in self.kv_proj(encoded).chunk(2, dim=1))
        write_kv(k, v, blocks, slots)

    def __call__(self, hidden: Tensor, blocks: KVBlocks, metadata: AttentionMetadata) -> Tensor:
        """Shapes: hidden [T, H] -> [T, heads * D], for `o_proj`."""
        q = self.q_proj.after_norm(hidden, self.norm).view(-1, *self._heads)
        return attend(q, blocks, metadata, Scores(scale=_SCALE))

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination); `prefix` is that of the layer's part."""
        yield from self.q_proj.named_weights(f"{prefix}.EncDecAttention")
        yield from self.kv_proj.named_weights(f"{prefix}.EncDecAttention")
        yield from self.o_proj.named_weights(f"{prefix}.EncDecAttention")
        yield from self.norm.named_weights(f"{prefix}.layer_norm")


class _StackLayer:
    """Attention over the own sequence, in a decoder then over the input, then experts or a dense network."""

    def __init__(
        self, config: ModelConfig, allocator: WeightAllocator, mlp: MLP | FusedMLP | MoE, *, is_encoder: bool
    ) -> None:
        self.self_attn = _SelfAttention(config, allocator)
        self.cross_attn = None if is_encoder else _CrossAttention(config, allocator)
        self.norm = Norm.of(config, allocator)
        self.mlp = mlp
        self._last_o_proj = (self.cross_attn or self.self_attn).o_proj
        self._stage: MoEStage | None = mlp.stage(self._last_o_proj, self.norm)

    def feed_forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add what the last attention and then the network bring.

        Shapes: hidden [T, H], attended [T, heads * D] -> [T, H].
        """
        is_routed_apart = isinstance(self.mlp, MoE) and self.mlp.given is not None
        if self._stage is not None and self._stage.slots is None and self.mlp.on_route is None and not is_routed_apart:
            return self._stage(hidden, attended)
        hidden = self._last_o_proj(attended, residual=hidden)
        return self.mlp(self.norm(hidden), residual=hidden)

    def network_prefix(self, prefix: str) -> str:
        """Return the prefix of the network's checkpoint names, given the layer's."""
        return f"{prefix}.layer.{1 if self.cross_attn is None else 2}"

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.self_attn.named_weights(f"{prefix}.layer.0")
        if self.cross_attn is not None:
            yield from self.cross_attn.named_weights(f"{prefix}.layer.1")
        network = self.network_prefix(prefix)
        yield from self.mlp.named_weights(network)
        yield from self.norm.named_weights(f"{network}.layer_norm")


class _Stack:
    """Layers of one kind, the relative positions they share, and the norm behind them."""

    def __init__(
        self,
        config: ModelConfig,
        allocator: WeightAllocator,
        num_layers: int,
        make_network: MakeNetwork,
        *,
        is_encoder: bool,
    ) -> None:
        positions = config.attention.relative_positions
        assert positions is not None
        self.bias = RelativeBias(allocator, positions, config.attention.num_heads, is_bidirectional=is_encoder)
        networks = (
            make_network(config, allocator, LayerPlace(layer_idx, is_encoder)) for layer_idx in range(num_layers)
        )
        self.layers = tuple(_StackLayer(config, allocator, mlp, is_encoder=is_encoder) for mlp in networks)
        self.norm = Norm.of(config, allocator)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self.bias.named_weights(f"{prefix}.block.0.layer.0.SelfAttention")
        for layer_idx, layer in enumerate(self.layers):
            yield from layer.named_weights(f"{prefix}.block.{layer_idx}")
        yield from self.norm.named_weights(f"{prefix}.final_layer_norm")


class _EncoderStack(_Stack):
    """Inputs that are visible as a whole to all their tokens."""

    def __init__(
        self, config: ModelConfig, allocator: WeightAllocator, num_layers: int, make_network: MakeNetwork
    ) -> None:
        super().__init__(config, allocator, num_layers, make_network, is_encoder=True)
        self._config, self._dtype, self._device = config, allocator.dtype, allocator.device
        self._kv: KVStorage | None = None  # of the layer that is being computed, as large as has been needed

    def __call__(self, hidden: Tensor, lengths: list[int]) -> Tensor:
        """Return what follows the final norm. Shapes: hidden [I, H] of inputs one after another -> [I, H]."""
        blocks = [-(-length // _BLOCK_SIZE) for length in lengths]
        ends = list(accumulate(blocks))
        metadata = AttentionMetadata.build(
            starts=[0] * len(lengths),
            num_tokens=lengths,
            block_ids=[range(end - number, end) for end, number in zip(ends, blocks, strict=True)],
            block_size=_BLOCK_SIZE,
            device=self._device,
            is_causal=False,
        )
        kv, bias = self._room(ends[-1]), self.bias.by_distance()
        for layer in self.layers:
            hidden = layer.feed_forward(hidden, layer.self_attn(hidden, kv, metadata, bias))
        return self.norm(hidden)

    def _room(self, num_blocks: int) -> KVBlocks:
        """Return so many blocks or more. Raises: CapacityError."""
        if self._kv is None or self._kv.num_blocks < num_blocks:
            self._kv = KVStorage(
                layers=range(1),
                num_blocks=num_blocks,
                block_size=_BLOCK_SIZE,
                num_kv_heads=self._config.attention.num_kv_heads,
                head_dim=self._config.attention.head_dim,
                dtype=self._dtype,
                device=self._device,
            )
            self._kv.will_write(range(num_blocks))
        return self._kv.layer(0)


class _Decoder(_Stack):
    """What continues a text given an input."""

    def __init__(self, config: ModelConfig, allocator: WeightAllocator, make_network: MakeNetwork) -> None:
        super().__init__(config, allocator, config.num_layers, make_network, is_encoder=False)

    def store_input(self, encoded: Tensor, context: ForwardContext, rows: Tensor) -> None:
        """Store each layer's keys and values of encoded inputs. Shapes: encoded [I, H], rows [I] of the pass."""
        slots = context.attention.slots[rows]
        for layer_idx, layer in enumerate(self.layers):
            assert layer.cross_attn is not None
            layer.cross_attn.store(encoded, context.kv.layer(layer_idx), slots)

    def __call__(self, hidden: Tensor, context: ForwardContext, parts: _Parts) -> Tensor:
        """Return what follows the final norm. Shapes: hidden [O, H] -> [O, H]."""
        bias = self.bias.by_distance()
        for layer_idx, layer in enumerate(self.layers):
            assert layer.cross_attn is not None
            blocks = context.kv.layer(layer_idx)
            attended = layer.self_attn(hidden, blocks, parts.own, bias)
            hidden = layer.self_attn.o_proj(attended, residual=hidden)
            attended = layer.cross_attn(hidden, blocks, parts.over_input)
            hidden = layer.feed_forward(hidden, attended)
        return self.norm(hidden)
