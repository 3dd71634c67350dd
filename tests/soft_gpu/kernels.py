"""Stands in for the Triton kernels on the GPU in software: counts their launches and computes their references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from moeflow.engine import decode_graphs
from moeflow.kernels import activation, logit_edits, norm, rotary
from moeflow.kernels import experts as experts_reference
from moeflow.kernels import normed_experts as normed_reference
from moeflow.kernels.attention import attention as attention_reference
from moeflow.kernels.attention import attention_input as attention_input_reference
from moeflow.kernels.attention import latent_attention
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.device_table import DeviceTable
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.cpu import device_flag
from moeflow.kernels.linear import linear, norm_linear
from moeflow.kernels.norm import ExpertNorms, NormWeights, PostNorms
from moeflow.kernels.recurrent import gates as gates_reference
from moeflow.kernels.recurrent import recurrence as recurrence_reference
from moeflow.kernels.recurrent import short_conv as short_conv_reference
from moeflow.kernels.recurrent.state_sequences import LayerStates, StateSequence, StateSequences
from moeflow.kernels.triton import activation as triton_activation
from moeflow.kernels.triton import attention as triton_attention
from moeflow.kernels.triton import attention_input as triton_attention_input
from moeflow.kernels.triton import (
    chunked_recurrence,
    draws,
    greedy,
    kv_cache,
    kv_moves,
    latent_input,
    launching,
    matrix_products,
    quantized_linear,
    rotary_table,
)
from moeflow.kernels.triton import experts as triton_experts
from moeflow.kernels.triton import gates as triton_gates
from moeflow.kernels.triton import logit_edits as triton_logit_edits
from moeflow.kernels.triton import norm as triton_norm
from moeflow.kernels.triton import norm_linear as triton_norm_linear
from moeflow.kernels.triton import normed_experts as triton_normed
from moeflow.kernels.triton import recurrence as triton_recurrence
from moeflow.kernels.triton import routing as triton_routing
from moeflow.kernels.triton import short_conv as triton_short_conv
from moeflow.pipeline.devices import staging
from tests.kernels.triton.interpreting import language_patched_once
from tests.soft_gpu.device import COUNTS, DEVICE, SoftGraph, SoftTensor, count_launch, raw, record, wrapped
from tests.soft_gpu.streams import soft_staging

Function = Callable[..., Any]
_DRAW = draws.draw
_CHUNKED = chunked_recurrence.recurrence
H100 = launching.GPU(capability=90, num_multiprocessors=132)


class _Recorder:
    """Stands in for what captures CUDA graphs."""

    def __init__(self, device: torch.device, steps: decode_graphs.HostSteps | None = None) -> None:
        self._steps = steps

    def capture(self, run: Callable[[], Any]) -> tuple[decode_graphs.CutGraph, Any]:
        run()
        graph = decode_graphs.CutGraph(SoftGraph)
        with nullcontext() if self._steps is None else self._steps.cut_by(graph.cut):
            graph.capture_begin()
            hidden = run()
            graph.capture_end()
        return graph, hidden


@contextmanager
def soft_kernels() -> Iterator[None]:
    """Have tensors on the device taken by the kernels' stand-ins in the block."""
    with ExitStack() as patches:
        patches.enter_context(language_patched_once())
        patches.enter_context(mock.patch.object(launching, "accepts", lambda x: isinstance(x, SoftTensor)))
        patches.enter_context(mock.patch.object(decode_graphs, "GraphRecorder", _Recorder))
        patches.enter_context(mock.patch.object(triton_attention, "gpu_of", return_value=H100))
        patches.enter_context(mock.patch.object(staging, "Staging", soft_staging))
        patches.enter_context(mock.patch.object(chunked_recurrence, "suits", _has_chunks))
        patches.enter_context(mock.patch.object(device_flag.DeviceFlag, "wait", _wait))
        # Hidden states of 128 numbers count as long rows, which they are in large models.
        patches.enter_context(mock.patch.object(triton_norm_linear, "_MOST_COLUMNS", 64))
        for module, name, reference in _REFERENCES:
            stand_in = _stand_in(getattr(module, name), reference)
            patches.enter_context(mock.patch.object(module, name, stand_in))
        for module in {matrix_products, *(module for module, *_ in _REFERENCES)}:
            if hasattr(module, "launch"):
                patches.enter_context(mock.patch.object(module, "launch", _count))
        yield


def _wait(flag: device_flag.DeviceFlag, seconds: float) -> bool:
    """Have the copies arrive, as they do while the host waits; a flag that is not among them would never come."""
    COUNTS.synchronizations["flag"] += 1
    COUNTS.arrive()
    assert flag.memory.item()
    return True


def _count(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
    count_launch(kernel.__name__)


def _stand_in(real: Function, reference: Function) -> Function:
    """Return a function that runs the kernels' own host code for its launches, and the reference for its numbers."""

    def run(*arguments: Any, **named: Any) -> Any:
        real(*arguments, **named)
        plain, plain_named = [*map(_plain, arguments)], {name: _plain(it) for name, it in named.items()}

        def compute() -> Any:
            with _disable_current_modes():  # its tensors are all in main memory
                return reference(*plain, **plain_named)

        found = compute()
        record(found, compute)
        return tuple(map(wrapped, found)) if isinstance(found, tuple) else wrapped(found)

    return run


def _plain(x: Any) -> Any:
    """Return a value with all tensors in main memory."""
    if isinstance(x, KVBlocks):
        return KVBlocks(
            raw(x.storage),
            x.dtype,
            num_kv_heads=x.num_kv_heads,
            block_size=x.block_size,
            head_dim=x.head_dim,
            latent_dim=x.latent_dim,
        )
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(
            x, **{it.name: _plain(getattr(x, it.name)) for it in dataclasses.fields(x) if it.init}
        )
    if isinstance(x, msgspec.Struct):
        return msgspec.structs.replace(x, **{name: _plain(getattr(x, name)) for name in x.__struct_fields__})
    if isinstance(x, tuple) and hasattr(x, "_replace"):
        return type(x)(*map(_plain, x))
    return tuple(map(_plain, x)) if type(x) is tuple else raw(x)


def _normalise(
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    *,
    subtracts_mean: bool,
    residual: Any = None,
    total: Any = None,
    hidden: Any = None,
    factor: Any = None,
    next_norm: Any = None,
    normed: Any = None,
) -> Any:
    if residual is not None:
        x = total.copy_(x + residual)
    weights = NormWeights(weight, eps, subtracts_mean, bias)
    out = norm.normalise(x, weights) if hidden is None else norm.add_normalised(hidden, x, weights, factor)
    if normed is not None:
        normed.copy_(norm.normalise(out, next_norm))
    return out


def _attend(
    q: torch.Tensor, blocks: KVBlocks, table: DeviceTable, scores: Scores, gates: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend from the tokens that the table names."""
    out = torch.zeros(len(q), q.shape[1] * blocks.value_dim, dtype=q.dtype)
    for first, start, number, place in table.sequences.T.tolist():
        if number == 0:
            continue
        num_blocks = -(-(start + number) // table.block_size)
        tokens = slice(first, first + number)
        metadata = AttentionMetadata.build(
            starts=[start],
            num_tokens=[number],
            block_ids=[table.block_ids[place : place + num_blocks].tolist()],
            block_size=table.block_size,
            device="cpu",
            tree_masks=None if table.tree_masks is None else table.tree_masks[tokens],
        )
        out[tokens] = attention_reference.attend_reference(q[tokens], blocks, metadata, scores)
    return out if gates is None else out * torch.sigmoid(gates)


def _attention_input(qkv: torch.Tensor, heads: Any, table: Any, blocks: KVBlocks, slots: torch.Tensor) -> Any:
    is_stored = slots >= 0
    kept = AttentionMetadata(slots[is_stored], (), blocks.block_size)
    some = None if table is None else rotary.RotaryTable(table.cos[is_stored], table.sin[is_stored])
    attention_input_reference.attention_input(qkv[is_stored].clone(), heads, some, blocks, kept)
    spare = KVBlocks(
        blocks.storage.clone(),
        blocks.dtype,
        num_kv_heads=blocks.num_kv_heads,
        block_size=blocks.block_size,
        head_dim=blocks.head_dim,
    )
    everywhere = AttentionMetadata(slots.clamp(min=0), (), blocks.block_size)
    return attention_input_reference.attention_input(qkv.clone(), heads, table, spare, everywhere)


def _write_kv(k: torch.Tensor, v: torch.Tensor | None, blocks: KVBlocks, slots: torch.Tensor) -> None:
    is_stored = slots >= 0
    blocks.write(slots[is_stored], k[is_stored], None if v is None else v[is_stored])


def _latent_input(
    q: torch.Tensor,
    kept: torch.Tensor,
    up: torch.Tensor,
    heads: Any,
    table: Any,
    blocks: KVBlocks,
    slots: torch.Tensor,
) -> torch.Tensor:
    latents, rotary_keys = kept.split([heads.latent_dim, heads.rope_dim], dim=1)
    latents = norm.normalise(latents.contiguous(), heads.latent_norm)
    keys = torch.cat([latents[:, None], latent_attention.rotated(rotary_keys[:, None], heads, table)], dim=-1)
    _write_kv(keys, None, blocks, slots)
    queries = q.new_zeros(len(q), heads.num_heads, heads.key_dim)
    nope, rope = q.view(len(q), heads.num_heads, heads.query_dim).split([heads.nope_dim, heads.rope_dim], dim=2)
    queries[..., : heads.latent_dim] = torch.einsum("thn,hnl->thl", nope, up[:, : heads.nope_dim])
    queries[..., heads.latent_dim :] = latent_attention.rotated(rope, heads, table)
    return queries


def _experts(
    x: torch.Tensor,
    gate_up: Any,
    down: Any,
    ids: Any,
    weights: Any,
    *,
    slots: Any = None,
    dtype: Any = None,
    **named: Any,
) -> torch.Tensor:
    if dtype is not None:
        total = named.pop("residual")
        return experts_reference.ExpertsInSlots(gate_up, down, slots, **named).sums(x, ids, weights, total)
    if slots is not None:
        gate_up, down = ([matrices[slot] for slot in slots.tolist()] for matrices in (gate_up, down))
    return experts_reference.fused_experts(x, gate_up, down, ids, weights, **named)


def _apply_and_mul(gate_up: torch.Tensor, function: Any, *, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    chosen = activation.ClampedSwiglu(alpha, limit) if function == "clamped_swiglu" else function
    return activation.apply_and_mul(chosen, gate_up)


def _expert_inputs(x: torch.Tensor, hidden: torch.Tensor, eps: float, norm: NormWeights, experts: ExpertNorms) -> Any:
    plain = NormWeights(torch.ones_like(norm.weight), eps)
    return normed_reference.expert_inputs(x, hidden, plain, PostNorms(norm, norm, experts))


def _of_states(reference: Function) -> Function:
    """Return an operation with states that takes its sequences from their table on the device."""

    def run(*arguments: Any, **named: Any) -> Any:
        *first, states, sequences = arguments
        spare = states.slots.shape[0]  # a further slot: of padding, whose states are not kept
        slots = torch.cat([states.slots, torch.zeros_like(states.slots[:1])])
        out = reference(*first, LayerStates(slots, states.offset), _sequences_of(sequences, spare), **named)
        states.slots.copy_(slots[:spare])
        return out

    return run


def _sequences_of(given: StateSequences, spare: int) -> StateSequences:
    """Return the sequences of a table on the device; `spare` is the slot of states that are not kept."""
    table = given.table_on(DEVICE)
    stores = [(count, slot if slot >= 0 else spare) for count, slot in raw(table.stores).T.tolist()]
    found = []
    for row, source, begin, end, _ in raw(table.sequences).T.tolist():
        *saves, (num_tokens, target) = stores[begin:end]
        found.append(StateSequence(row, num_tokens, source, target, saves))
    return StateSequences(found)


def _has_chunks(values: Any, sequences: StateSequences) -> bool:
    """Return whether a pass is long enough, also in float32."""
    return sequences.table_on(values.device).chunks is not None


def _in_chunks(layer: Any, given: Any, states: LayerStates, sequences: StateSequences) -> torch.Tensor:
    """Run the kernels themselves, by Triton's interpreter."""
    plain = StateSequences((), _plain(sequences.table_on(DEVICE)))
    with mock.patch.object(chunked_recurrence, "launch", launching.launch):
        return _CHUNKED(layer, given, states, plain)


def _draw(*arguments: Any) -> torch.Tensor:
    """Run the kernels themselves, by Triton's interpreter."""
    with mock.patch.object(draws, "launch", launching.launch):
        return _DRAW(*arguments)


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    largest, tokens = logits.max(dim=1)
    return torch.where(largest.isfinite(), tokens, -1)


_REFERENCES: tuple[tuple[ModuleType, str, Function], ...] = (
    (triton_norm, "normalise", _normalise),
    (triton_attention, "attend", _attend),
    (triton_attention_input, "attention_input", _attention_input),
    (kv_cache, "write_kv", _write_kv),
    (kv_moves, "move_kv", KVBlocks.move),
    (latent_input, "latent_input", _latent_input),
    (triton_routing, "route", lambda logits, routing: routing(logits)),
    (triton_activation, "apply_and_mul", _apply_and_mul),
    (rotary_table, "rotary_table", rotary.rotary_table),
    (triton_recurrence, "recurrence", _of_states(recurrence_reference.recurrence)),
    (chunked_recurrence, "recurrence", _in_chunks),
    (triton_short_conv, "short_conv", _of_states(short_conv_reference.short_conv)),
    (triton_experts, "fused_experts", _experts),
    (triton_experts, "fused_experts_norm", experts_reference.fused_experts_norm),
    (triton_normed, "expert_inputs", _expert_inputs),
    (triton_normed, "normed_experts", normed_reference.normed_experts),
    (triton_norm_linear, "norm_linear", norm_linear),
    (quantized_linear, "quantized_linear", linear),
    (greedy, "greedy", _greedy),
    (draws, "draw", _draw),
    (triton_logit_edits, "edited", lambda logits, edits: torch.from_numpy(logit_edits.edited(logits, edits))),
    (quantized_linear, "wide_linear", linear),
    (triton_experts, "expert_pairs", experts_reference.expert_pairs),
    (triton_gates, "gated_norm", gates_reference.gated_norm),
    (triton_gates, "sigmoid_gate", gates_reference.sigmoid_gate),
)
