"""Linear attention with decay. The reference is `kernels/recurrent/recurrence.py`.

A program keeps 16 value dimensions of one head's state in registers, [key_dim, 16]. It takes the tokens of its
sequence one after another. So the kernel reads and writes each state once: 2 MiB in a layer of Qwen3-Next, which 256
programs share. Value dimensions do not depend on each other, and the bits of a token do not depend on its pass.
Tokens wait for each other, so that latency bounds prompts. Hence a program is one warp, without barriers between warps,
and loads inputs before the token's turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceInput, RecurrenceLayer
from moeflow.kernels.recurrent.state_sequences import LayerStates, StateSequences
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

_VALUE_BLOCK: Final = 16
_WARP_VALUES: Final = 2048  # of a state: 64 in each thread's registers
_STAGES = tl.constexpr(3)  # of loads: two tokens ahead


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))`, exact for large and for small results.

    The logarithm is a series of `z = e / (2 + e)`, at most 1/3: the GPU's own is coarse near 1.
    """
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    y = z * z
    series = 1.0 / 7 + y * (1.0 / 9 + y * (1.0 / 11 + y * (1.0 / 13)))
    series = 1.0 + y * (1.0 / 3 + y * (1.0 / 5 + y * series))
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def load_gates(steps_ptr, rates_ptr, row, gate_stride, has_rates: tl.constexpr):
    """Return a token's step and rate of one head, as the layer projects them, float32."""
    step = tl.load(steps_ptr + row * gate_stride).to(tl.float32)
    rate = step
    if has_rates:
        rate = tl.load(rates_ptr + row * gate_stride).to(tl.float32)
    return step, rate


@triton.jit(do_not_specialize=["num_sequences", "num_stores"])
def recurrence_kernel(
    queries_ptr,
    keys_ptr,
    values_ptr,
    row_stride,
    steps_ptr,
    rates_ptr,
    gate_stride,
    step_bias_ptr,
    log_decay_ptr,
    skip_ptr,
    slots_ptr,
    slot_stride,
    sequences_ptr,
    stores_ptr,
    num_sequences,
    num_stores,
    out_ptr,
    norm_eps,
    query_scale,
    least_step,
    most_step,
    num_heads: tl.constexpr,
    num_key_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    takes_turns: tl.constexpr,
    is_delta: tl.constexpr,
    has_norm: tl.constexpr,
    has_rates: tl.constexpr,
    has_skip: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
):
    """Compute a head and a block of its values for the chain of sequences that begins with `program_id(1)`.

    Shapes: queries and keys [T, key heads, key_dim], values [T, heads, value_dim], rows `row_stride` apart.
    Steps and rates [T, heads], rows `gate_stride` apart. Step_bias, log_decay and skip [heads].
    Slots [slots, heads, key_dim, value_dim], `slot_stride` apart. Sequences [5, S] and stores [2, n] of a `StateTable`.
    Out [T, heads, value_dim].
    """
    num_blocks: tl.constexpr = (value_dim + value_block - 1) // value_block
    head = tl.program_id(0) // num_blocks
    columns = tl.program_id(0) % num_blocks * value_block + tl.arange(0, value_block)
    rows = tl.arange(0, key_block)
    is_key, is_value = rows < key_dim, columns < value_dim
    is_inside = is_key[:, None] & is_value[None, :]
    key_head = head % num_key_heads if takes_turns else head // (num_heads // num_key_heads)
    queries_ptr += key_head * key_dim + rows
    keys_ptr += key_head * key_dim + rows
    values_ptr += head * value_dim + columns
    steps_ptr += head
    rates_ptr += head
    out_ptr += head * value_dim + columns
    slots_ptr += head * (key_dim * value_dim) + rows[:, None] * value_dim + columns[None, :]
    step_bias = tl.load(step_bias_ptr + head)
    decay_rate = tl.exp(tl.load(log_decay_ptr + head))
    skip = tl.load(skip_ptr + head) if has_skip else 0.0
    first = tl.program_id(1)
    for sequence in range(first, tl.load(sequences_ptr + 4 * num_sequences + first)):
        first_row = tl.load(sequences_ptr + sequence).to(tl.int64)
        source = tl.load(sequences_ptr + num_sequences + sequence).to(tl.int64)
        begin = tl.load(sequences_ptr + 2 * num_sequences + sequence)
        end = tl.load(sequences_ptr + 3 * num_sequences + sequence)
        state = tl.zeros([key_block, value_block], tl.float32)
        if source >= 0:
            state = tl.load(slots_ptr + source * slot_stride, mask=is_inside, other=0.0)
        num_done = 0
        for store in range(begin, end):
            num_tokens = tl.load(stores_ptr + store)
            last = tl.maximum(num_tokens - 1, 0)
            next_row = first_row + tl.minimum(num_done, last)
            next_step, next_rate = load_gates(steps_ptr, rates_ptr, next_row, gate_stride, has_rates)
            for token in tl.range(num_done, num_tokens, num_stages=_STAGES):
                row = first_row + token
                query = tl.load(queries_ptr + row * row_stride, mask=is_key, other=0.0).to(tl.float32)
                key = tl.load(keys_ptr + row * row_stride, mask=is_key, other=0.0).to(tl.float32)
                value = tl.load(values_ptr + row * row_stride, mask=is_value, other=0.0).to(tl.float32)
                step = tl.minimum(tl.maximum(softplus(next_step + step_bias), least_step), most_step)
                rate = tl.sigmoid(next_rate) if has_rates else step
                next_row = first_row + tl.minimum(token + 1, last)
                next_step, next_rate = load_gates(steps_ptr, rates_ptr, next_row, gate_stride, has_rates)
                if has_norm:
                    query *= 1.0 / tl.sqrt_rn(tl.sum(query * query, axis=0) + norm_eps)
                    key *= 1.0 / tl.sqrt_rn(tl.sum(key * key, axis=0) + norm_eps)
                state *= tl.exp(-decay_rate * step)
                added = value
                if is_delta:
                    added -= tl.sum(state * key[:, None], axis=0)
                state += key[:, None] * (added * rate)[None, :]
                found = tl.sum(state * (query * query_scale)[:, None], axis=0)
                if has_skip:
                    found += value * skip
                out = found.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + row * (num_heads * value_dim), out, mask=is_value)
            num_done = num_tokens
            slot = tl.load(stores_ptr + num_stores + store).to(tl.int64)
            if slot >= 0:
                tl.store(slots_ptr + slot * slot_stride, state, mask=is_inside)
        tl.debug_barrier()  # the next sequence may read what other threads of this program have stored


def recurrence(
    layer: RecurrenceLayer, given: RecurrenceInput, states: LayerStates, sequences: StateSequences
) -> Tensor:
    """Compute `kernels.recurrent.recurrence` in one launch.

    Rows of queries, keys and values are equally far apart, and so are those of steps and rates.
    """
    table = sequences.table_on(given.values.device)
    rates = given.steps if given.rates is None else given.rates
    assert given.queries.stride(0) == given.keys.stride(0) == given.values.stride(0), "parts of one row"
    assert given.steps.stride(0) == rates.stride(0), "parts of one row"
    out = torch.empty(
        given.values.shape[0],
        layer.num_heads * layer.value_dim,
        dtype=given.values.dtype,
        device=given.values.device,
    )
    key_block = triton.next_power_of_2(layer.key_dim)
    value_block = min(triton.next_power_of_2(layer.value_dim), _VALUE_BLOCK)
    launch(
        recurrence_kernel,
        (layer.num_heads * triton.cdiv(layer.value_dim, value_block), table.num_sequences),
        given.queries,
        given.keys,
        given.values,
        given.values.stride(0),
        given.steps,
        rates,
        given.steps.stride(0),
        layer.step_bias,
        layer.log_decay,
        layer.log_decay if layer.skip is None else layer.skip,
        states.slots[:, states.offset :],
        states.slots.stride(0),
        table.sequences,
        table.stores,
        table.num_sequences,
        table.stores.shape[1],
        out,
        0.0 if layer.norm_eps is None else layer.norm_eps,
        layer.query_scale,
        layer.least_step,
        layer.most_step,
        num_heads=layer.num_heads,
        num_key_heads=layer.num_key_heads,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
        takes_turns=layer.key_heads_take_turns,
        is_delta=layer.is_delta,
        has_norm=layer.norm_eps is not None,
        has_rates=given.rates is not None,
        has_skip=layer.skip is not None,
        key_block=key_block,
        value_block=value_block,
        num_warps=max(key_block * value_block // _WARP_VALUES, 1),
    )
    return out
