"""A model without an engine, for calibration and measurement on the CPU: whole sequences in, hidden states out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol, cast

import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.engine_config import BLOCK_SIZE
from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.recurrent.state_sequences import NO_STATE, StateSequence, StateSequences
from moeflow.kv.state_storage import StateStorage
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.models.layers.mlp import MLP, FusedMLP
from moeflow.models.layers.moe import MoE
from moeflow.models.loading import load_causal_lm
from moeflow.planner.hardware.host import host_resources


def load_bare_model(checkpoint: Checkpoint, on_bytes: Callable[[int, int], None] | None = None) -> CausalLM:
    """Load in float32, the fastest type on CPUs, or in bfloat16 if memory is short.

    Raises: CapacityError if memory holds neither; CheckpointError.
    """
    num_values = checkpoint.tensors.num_values
    have_bytes = host_resources().available_bytes
    for dtype in (torch.float32, torch.bfloat16):
        need_bytes = num_values * dtype.itemsize * 9 // 8  # an eighth for a pass
        if need_bytes <= have_bytes:
            return load_causal_lm(checkpoint, TensorAllocator(dtype, torch.device("cpu")), progress=on_bytes)
    raise CapacityError(
        f"not enough memory for {checkpoint.path}: need {format_bytes(need_bytes)}, have {format_bytes(have_bytes)}. "
        "Close other programs, or use a smaller model"
    )


@torch.inference_mode()
def run_sequence(
    model: CausalLM,
    token_ids: Sequence[int],
    on_inputs: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Return the final hidden states [T, H] of a sequence of at least one token; `on_inputs` as `ForwardContext`'s."""
    context = sequences_context(model, [len(token_ids)], on_inputs)
    hidden_states: torch.Tensor = model(torch.tensor(token_ids, device=model.device), context)
    return hidden_states


def sequences_context(
    model: CausalLM,
    lengths: Sequence[int],
    on_inputs: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> ForwardContext:
    """Return the context of a pass over whole sequences, one after the other, for the model's own layers."""
    config = model.config
    layers = [it for it in config.kv_layers if it - model.first_layer in range(len(model.layers))]
    kv, attention = _storage(
        model, layers, lengths, latent_dim=config.attention.latent_dim, other_heads=config.attention.other_heads
    )
    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    states = None
    if config.recurrent is not None:
        kv.states = StateStorage(config.recurrent, len(lengths), model.device)
        firsts = accumulate(lengths, initial=0)
        states = StateSequences(
            [
                StateSequence(first, length, NO_STATE, slot)
                for slot, (first, length) in enumerate(zip(firsts, lengths, strict=False))
            ]
        )
    return ForwardContext(positions, attention, kv, states, on_inputs=on_inputs)


@torch.inference_mode()
def run_input(model: EncoderDecoderLM, given: Sequence[int], own: Sequence[int]) -> None:
    """Encode an input and run the decoder over its own tokens: one or more of each."""
    padding = -len(given) % BLOCK_SIZE
    token_ids = torch.tensor([*given, *[0] * padding, *own], device=model.device)
    kv, attention = _storage(model, range(model.config.num_layers), [len(token_ids)])
    positions = torch.arange(len(token_ids), device=model.device)
    model(token_ids, ForwardContext(positions, attention, kv, num_encoder_tokens=[len(given)]))


def _storage(
    model: CausalLM | EncoderDecoderLM, layers: Sequence[int], lengths: Sequence[int], **shape: Any
) -> tuple[KVStorage, AttentionMetadata]:
    """Return an empty KV storage for sequences, and the metadata of their prefill."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    ends = list(accumulate(counts))
    kv = KVStorage(
        layers=layers,
        num_blocks=ends[-1],
        block_size=BLOCK_SIZE,
        num_kv_heads=model.config.attention.num_kv_heads,
        head_dim=model.config.attention.head_dim,
        dtype=model.dtype,
        device=model.device,
        **shape,
    )
    kv.will_write(range(kv.num_blocks))
    attention = AttentionMetadata.build(
        starts=[0] * len(lengths),
        num_tokens=list(lengths),
        block_ids=[range(end - count, end) for count, end in zip(counts, ends, strict=True)],
        block_size=BLOCK_SIZE,
        device=model.device,
    )
    return kv, attention


class HasNetwork(Protocol):
    """A layer of a decoder or an encoder."""

    mlp: MLP | FusedMLP | MoE


@contextmanager
def ffn_inputs(layers: Sequence[HasNetwork], dtype: torch.dtype = torch.bfloat16) -> Iterator[list[list[torch.Tensor]]]:
    """Yield one list per layer. Every pass appends the input of its feed-forward block, [T, H]."""
    listeners = [_Listener(layer.mlp, dtype) for layer in layers]
    for layer, listener in zip(layers, listeners, strict=True):
        layer.mlp = cast(MLP, listener)
    try:
        yield [listener.collected for listener in listeners]
    finally:
        for layer, listener in zip(layers, listeners, strict=True):
            layer.mlp = listener.block


class _Listener:
    """Records the inputs of a feed-forward block."""

    def __init__(self, block: MLP | FusedMLP | MoE, dtype: torch.dtype) -> None:
        self.block = block
        self.on_route = self._ignore  # an encoder's layer calls a block with this attribute directly
        self._dtype = dtype
        self.collected: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        self.collected.append(hidden.to(self._dtype))
        return self.block(hidden, residual)

    def _ignore(self, topk_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """The block has its own callback."""
