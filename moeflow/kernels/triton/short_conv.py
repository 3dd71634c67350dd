"""Convolutions of each channel over its last few inputs. The reference is `kernels/recurrent/short_conv.py`.

A program takes 32 channels of a sequence, 64 tokens at a time, or one token in a pass of decodes. It reads each input
once from memory and again from its cache for the other taps. Channels do not depend on each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.recurrent.state_sequences import LayerStates, StateSequences
from moeflow.kernels.triton.activation import activation
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

_CHANNEL_BLOCK: Final = 32
_TOKEN_BLOCK: Final = 64


@triton.jit
def load_seen(
    x_ptr,
    gate_ptr,
    x_stride,
    state_ptr,
    source,
    places,
    columns,
    is_inside,
    num_channels: tl.constexpr,
    num_kept: tl.constexpr,
    has_gates: tl.constexpr,
):
    """Return a sequence's inputs at places [n], [n, columns] float32. Negative places are those of the state."""
    from_x = places[:, None].to(tl.int64) * x_stride + columns[None, :]
    is_new = is_inside & (places >= 0)[:, None]
    x = tl.load(x_ptr + from_x, mask=is_new, other=0.0)
    if has_gates:
        gate = tl.load(gate_ptr + from_x, mask=is_new, other=0.0)
        x = (x.to(tl.float32) * gate.to(tl.float32)).to(x.dtype)
    first = tl.where(source >= 0, -num_kept, 0)
    is_old = is_inside & (places < 0)[:, None] & (places >= first)[:, None]
    from_state = (places + num_kept)[:, None] * num_channels + columns[None, :]
    return x.to(tl.float32) + tl.load(state_ptr + from_state, mask=is_old, other=0.0)


@triton.jit(do_not_specialize=["num_sequences", "num_stores"])
def short_conv_kernel(
    x_ptr,
    in_gate_ptr,
    out_gate_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    slots_ptr,
    slot_stride,
    sequences_ptr,
    stores_ptr,
    num_sequences,
    num_stores,
    out_ptr,
    num_channels: tl.constexpr,
    num_taps: tl.constexpr,
    has_bias: tl.constexpr,
    has_gates: tl.constexpr,
    has_silu: tl.constexpr,
    kept_block: tl.constexpr,
    token_block: tl.constexpr,
    channel_block: tl.constexpr,
):
    """Compute a block of channels for the chain of sequences that begins with `program_id(1)`.

    Shapes: x and gates [T, C], rows `x_stride` apart. Weight [C, taps], bias [C].
    Slots [slots, taps - 1, C], `slot_stride` apart. Sequences [5, S] and stores [2, n] of a `StateTable`. Out [T, C].
    """
    num_kept: tl.constexpr = num_taps - 1
    columns = tl.program_id(0) * channel_block + tl.arange(0, channel_block)
    is_channel = columns < num_channels
    kept_rows = tl.arange(0, kept_block)
    is_kept = (kept_rows < num_kept)[:, None] & is_channel[None, :]
    bias = tl.zeros([channel_block], tl.float32)
    if has_bias:
        bias = tl.load(bias_ptr + columns, mask=is_channel, other=0.0).to(tl.float32)
    first = tl.program_id(1)
    for sequence in range(first, tl.load(sequences_ptr + 4 * num_sequences + first)):
        row = tl.load(sequences_ptr + sequence).to(tl.int64)
        source = tl.load(sequences_ptr + num_sequences + sequence).to(tl.int64)
        begin = tl.load(sequences_ptr + 2 * num_sequences + sequence)
        end = tl.load(sequences_ptr + 3 * num_sequences + sequence)
        num_tokens = tl.load(stores_ptr + end - 1, mask=begin < end, other=0)
        row_x_ptr, row_gate_ptr = x_ptr + row * x_stride, in_gate_ptr + row * x_stride
        state_ptr = slots_ptr + source * slot_stride
        for start in range(0, num_tokens, token_block):
            places = start + tl.arange(0, token_block)
            is_inside = (places < num_tokens)[:, None] & is_channel[None, :]
            total = tl.zeros([token_block, channel_block], tl.float32) + bias[None, :]
            for tap in tl.static_range(num_taps):
                weight = tl.load(weight_ptr + columns * num_taps + tap, mask=is_channel, other=0.0).to(tl.float32)
                seen = load_seen(
                    row_x_ptr,
                    row_gate_ptr,
                    x_stride,
                    state_ptr,
                    source,
                    places + (tap - num_kept),
                    columns,
                    is_inside,
                    num_channels,
                    num_kept,
                    has_gates,
                )
                total += seen * weight[None, :]
            if has_silu:
                total = activation(total, "silu")
            out = total.to(out_ptr.dtype.element_ty)
            rows = row + places[:, None]
            if has_gates:
                gate = tl.load(out_gate_ptr + rows * x_stride + columns[None, :], mask=is_inside, other=0.0)
                out = (out.to(tl.float32) * gate.to(tl.float32)).to(out.dtype)
            tl.store(out_ptr + rows * num_channels + columns[None, :], out, mask=is_inside)
        for store in range(begin, end):
            places = tl.load(stores_ptr + store) - num_kept + kept_rows
            slot = tl.load(stores_ptr + num_stores + store).to(tl.int64)
            state = load_seen(
                row_x_ptr,
                row_gate_ptr,
                x_stride,
                state_ptr,
                source,
                places,
                columns,
                is_kept,
                num_channels,
                num_kept,
                has_gates,
            )
            tl.debug_barrier()  # the slot may be the one that other threads still read
            if slot >= 0:
                to_state = kept_rows[:, None] * num_channels + columns[None, :]
                tl.store(slots_ptr + slot * slot_stride + to_state, state, mask=is_kept)
        tl.debug_barrier()  # the next sequence may read what other threads of this program have stored


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: LayerStates,
    sequences: StateSequences,
    *,
    gates: tuple[Tensor, Tensor] | None,
    has_silu: bool,
) -> Tensor:
    """Compute `kernels.recurrent.short_conv` in one launch. Rows of x and gates are equally far apart."""
    table = sequences.table_on(x.device)
    before, behind = (x, x) if gates is None else gates
    assert x.stride(0) == before.stride(0) == behind.stride(0), "parts of one row"
    num_channels, num_taps = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    is_decode = table.max_tokens == 1
    launch(
        short_conv_kernel,
        (triton.cdiv(num_channels, _CHANNEL_BLOCK), table.num_sequences),
        x,
        before,
        behind,
        x.stride(0),
        weight,
        weight if bias is None else bias,
        states.slots[:, states.offset :],
        states.slots.stride(0),
        table.sequences,
        table.stores,
        table.num_sequences,
        table.stores.shape[1],
        out,
        num_channels=num_channels,
        num_taps=num_taps,
        has_bias=bias is not None,
        has_gates=gates is not None,
        has_silu=has_silu,
        kept_block=triton.next_power_of_2(max(num_taps - 1, 1)),
        token_block=1 if is_decode else _TOKEN_BLOCK,
        channel_block=_CHANNEL_BLOCK,
        num_warps=1 if is_decode else 4,
    )
    return out
