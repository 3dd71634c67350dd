"""Linear attention with decay over prompts, in chunks of tokens. The reference is `kernels/recurrent/recurrence.py`.

Within a chunk, tokens see each other by products of matrices (2406.06484 section 3, 2412.06464 section 3.3):

    U = T (b (V - exp(g) K S)),  T = (I + tril(b exp(g_i - g_j) K K^T, -1))^-1
    O = exp(g) Q S + P U,        P = tril(exp(g_i - g_j) Q K^T)
    S = exp(g_C) S + (exp(g_C - g) K)^T U

where g sums the logarithms of decays, and b has the rates. Without the delta rule, U is b V, which is Mamba2's form
(2405.21060 section 6). `chunk_kernel` computes T and P of all chunks at the same time. `carry_kernel` takes the chunks
of a sequence one after another, with 16 value dimensions of one head's state in registers. Products multiply TF32 and
accumulate float32, the inverse as exactly as float32. So these kernels are for models in 16 bits.

Least traffic of a token in a layer of Qwen3-Next (32 heads of 128, 16 key heads), bfloat16: 16 KB of queries, keys and
values, 8 KB of results, 8 KB of T and P. These are written once, and eight programs read them, mostly from the L2
cache. So 4,096 tokens take 164 MB, or 34 us on an H200. Products take 180 KFLOP for each token and head, or 24 GFLOP:
50 us at the rate of TF32. But chunks wait for each other: 128 turns of 2 us or so, in 256 programs. One token after
another takes 4,096 turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceInput, RecurrenceLayer
from moeflow.kernels.recurrent.state_sequences import LayerStates, StateSequences
from moeflow.kernels.recurrent.state_table import CHUNK_TOKENS
from moeflow.kernels.triton.launching import gpu_of, launch
from moeflow.kernels.triton.recurrence import softplus

if TYPE_CHECKING:
    from torch import Tensor

_VALUE_BLOCK: Final = 16
_LEAST_SIZE: Final = 16  # of a product
_FIRST_CAPABILITY: Final = 80  # whose tensor cores multiply TF32
_CHUNK = tl.constexpr(CHUNK_TOKENS)
_LEVELS = tl.constexpr(CHUNK_TOKENS.bit_length() - 1)


@triton.jit
def load_keys(x_ptr, row_stride, rows, is_inside, columns, key_dim: tl.constexpr, has_norm: tl.constexpr, norm_eps):
    """Return the keys, or queries, of a chunk's tokens as the recurrence uses them, [chunk, key_block] float32."""
    x = tl.load(
        x_ptr + rows[:, None] * row_stride + columns[None, :],
        mask=is_inside[:, None] & (columns < key_dim)[None, :],
        other=0.0,
    ).to(tl.float32)
    if has_norm:
        x *= (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) + norm_eps))[:, None]
    return x


@triton.jit
def load_chunk_gates(
    steps_ptr,
    rates_ptr,
    gate_stride,
    rows,
    is_inside,
    step_bias,
    decay_rate,
    least_step,
    most_step,
    has_rates: tl.constexpr,
):
    """Return the sums of the logarithms of a chunk's decays, and its rates, [chunk] each; both of one head."""
    step = tl.load(steps_ptr + rows * gate_stride, mask=is_inside, other=0.0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step + step_bias), least_step), most_step)
    rate = step
    if has_rates:
        rate = tl.sigmoid(tl.load(rates_ptr + rows * gate_stride, mask=is_inside, other=0.0).to(tl.float32))
    sums = tl.cumsum(tl.where(is_inside, -decay_rate * step, 0.0), axis=0)
    return sums, tl.where(is_inside, rate, 0.0)


@triton.jit
def inverse_of_lower(lower):
    """Return `(I + lower)^-1` of a matrix whose numbers lie below the diagonal, [chunk, chunk].

    Inverses of diagonal blocks of s rows make those of 2 s rows: `[[A, 0], [B, C]]` has `-C^-1 B A^-1` below.
    """
    places = tl.arange(0, _CHUNK)
    row, column = places[:, None], places[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(_LEVELS):
        is_below = (row >> level == (column >> level) + 1) & ((row >> level) % 2 == 1)
        below = tl.where(is_below, lower, 0.0)
        if level > 0:
            below = tl.dot(below, inverse, input_precision="tf32x3")
            below = tl.dot(inverse, below, input_precision="tf32x3")
        inverse -= below
    return inverse


@triton.jit(do_not_specialize=["num_chunks"])
def chunk_kernel(
    queries_ptr,
    keys_ptr,
    row_stride,
    steps_ptr,
    rates_ptr,
    gate_stride,
    step_bias_ptr,
    log_decay_ptr,
    chunks_ptr,
    num_chunks,
    solved_ptr,
    seen_ptr,
    norm_eps,
    query_scale,
    least_step,
    most_step,
    num_heads: tl.constexpr,
    num_key_heads: tl.constexpr,
    key_dim: tl.constexpr,
    takes_turns: tl.constexpr,
    is_delta: tl.constexpr,
    has_norm: tl.constexpr,
    has_rates: tl.constexpr,
    key_block: tl.constexpr,
):
    """Store T (solved, with the delta rule alone) and P (seen) of one head and one chunk.

    Shapes: queries and keys [T, key heads, key_dim], rows `row_stride` apart. Steps and rates [T, heads], rows
    `gate_stride` apart. Step_bias and log_decay [heads]. Chunks [2, n]: first token and number of tokens.
    Solved and seen [T, heads, chunk]: the row of each token.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    places = tl.arange(0, _CHUNK)
    columns = tl.arange(0, key_block)
    is_inside = places < tl.load(chunks_ptr + num_chunks + chunk)
    rows = tl.load(chunks_ptr + chunk).to(tl.int64) + places
    key_head = head % num_key_heads if takes_turns else head // (num_heads // num_key_heads)
    queries_ptr += key_head * key_dim
    keys_ptr += key_head * key_dim
    sums, rates = load_chunk_gates(
        steps_ptr + head,
        rates_ptr + head,
        gate_stride,
        rows,
        is_inside,
        tl.load(step_bias_ptr + head),
        tl.exp(tl.load(log_decay_ptr + head)),
        least_step,
        most_step,
        has_rates,
    )
    keys = load_keys(keys_ptr, row_stride, rows, is_inside, columns, key_dim, has_norm, norm_eps)
    queries = load_keys(queries_ptr, row_stride, rows, is_inside, columns, key_dim, has_norm, norm_eps)
    is_past = places[:, None] >= places[None, :]
    decays = tl.exp(tl.where(is_past, sums[:, None] - sums[None, :], -float("inf")))
    out = (rows[:, None] * num_heads + head) * _CHUNK + places[None, :]
    seen = tl.dot(queries, tl.trans(keys)) * decays * query_scale
    tl.store(seen_ptr + out, seen, mask=is_inside[:, None])
    if is_delta:
        lower = tl.dot(keys, tl.trans(keys)) * decays * rates[:, None]
        lower = tl.where(places[:, None] > places[None, :], lower, 0.0)
        tl.store(solved_ptr + out, inverse_of_lower(lower), mask=is_inside[:, None])


@triton.jit(do_not_specialize=["num_sequences", "num_stores"])
def carry_kernel(
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
    solved_ptr,
    seen_ptr,
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

    Shapes: those of `recurrence_kernel`, and solved and seen of `chunk_kernel`.
    """
    num_blocks: tl.constexpr = (value_dim + value_block - 1) // value_block
    head = tl.program_id(0) // num_blocks
    columns = tl.program_id(0) % num_blocks * value_block + tl.arange(0, value_block)
    key_columns = tl.arange(0, key_block)
    places = tl.arange(0, _CHUNK)
    is_value = columns < value_dim
    is_state = (key_columns < key_dim)[:, None] & is_value[None, :]
    key_head = head % num_key_heads if takes_turns else head // (num_heads // num_key_heads)
    queries_ptr += key_head * key_dim
    keys_ptr += key_head * key_dim
    steps_ptr += head
    rates_ptr += head
    slots_ptr += head * (key_dim * value_dim) + key_columns[:, None] * value_dim + columns[None, :]
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
            state = tl.load(slots_ptr + source * slot_stride, mask=is_state, other=0.0)
        num_done = 0
        for store in range(begin, end):
            num_tokens = tl.load(stores_ptr + store)
            for token in range(num_done, num_tokens, _CHUNK):
                is_inside = token + places < num_tokens
                rows = first_row + token + places
                sums, rates = load_chunk_gates(
                    steps_ptr,
                    rates_ptr,
                    gate_stride,
                    rows,
                    is_inside,
                    step_bias,
                    decay_rate,
                    least_step,
                    most_step,
                    has_rates,
                )
                last = tl.min(sums, axis=0)
                is_out = is_inside[:, None] & is_value[None, :]
                at = rows[:, None] * (num_heads * value_dim) + head * value_dim + columns[None, :]
                of_values = rows[:, None] * row_stride + head * value_dim + columns[None, :]
                values = tl.load(values_ptr + of_values, mask=is_out, other=0.0).to(tl.float32)
                of_chunk = (rows[:, None] * num_heads + head) * _CHUNK + places[None, :]
                keys = load_keys(keys_ptr, row_stride, rows, is_inside, key_columns, key_dim, has_norm, norm_eps)
                added = values
                if is_delta:
                    found = tl.dot(keys, state)
                    added -= found * tl.exp(sums)[:, None]
                added *= rates[:, None]
                if is_delta:
                    solved = tl.load(solved_ptr + of_chunk, mask=is_inside[:, None], other=0.0)
                    added = tl.dot(solved, added)
                queries = load_keys(queries_ptr, row_stride, rows, is_inside, key_columns, key_dim, has_norm, norm_eps)
                seen = tl.load(seen_ptr + of_chunk, mask=is_inside[:, None], other=0.0)
                out = tl.dot(queries, state) * (tl.exp(sums) * query_scale)[:, None]
                out += tl.dot(seen, added)
                if has_skip:
                    out += values * skip
                tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_out)
                kept = keys * tl.exp(last - sums)[:, None]
                state = state * tl.exp(last) + tl.dot(tl.trans(kept), added)
            num_done = num_tokens
            slot = tl.load(stores_ptr + num_stores + store).to(tl.int64)
            if slot >= 0:
                tl.store(slots_ptr + slot * slot_stride, state, mask=is_state)
        tl.debug_barrier()  # the next sequence may read what other threads of this program have stored


def suits(values: Tensor, sequences: StateSequences) -> bool:
    """Return whether a pass is computed in chunks: a sequence has enough tokens, and TF32 is exact enough."""
    is_short = sequences.table_on(values.device).chunks is None
    return not is_short and values.dtype.itemsize == 2 and gpu_of(values).capability >= _FIRST_CAPABILITY


def recurrence(
    layer: RecurrenceLayer, given: RecurrenceInput, states: LayerStates, sequences: StateSequences
) -> Tensor:
    """Compute `kernels.recurrent.recurrence` in two launches, all sequences in chunks.

    Rows of queries, keys and values are equally far apart, and so are those of steps and rates.
    """
    table = sequences.table_on(given.values.device)
    assert table.chunks is not None, "such passes have chunks"
    rates = given.steps if given.rates is None else given.rates
    assert given.queries.stride(0) == given.keys.stride(0) == given.values.stride(0), "parts of one row"
    assert given.steps.stride(0) == rates.stride(0), "parts of one row"
    num_tokens, device = given.values.shape[0], given.values.device
    seen = torch.empty(num_tokens, layer.num_heads, CHUNK_TOKENS, dtype=torch.float32, device=device)
    solved = torch.empty(seen.shape, dtype=torch.float32, device=device) if layer.is_delta else seen
    out = torch.empty(num_tokens, layer.num_heads * layer.value_dim, dtype=given.values.dtype, device=device)
    common = {
        "num_heads": layer.num_heads,
        "num_key_heads": layer.num_key_heads,
        "key_dim": layer.key_dim,
        "takes_turns": layer.key_heads_take_turns,
        "is_delta": layer.is_delta,
        "has_norm": layer.norm_eps is not None,
        "has_rates": given.rates is not None,
        "key_block": max(triton.next_power_of_2(layer.key_dim), _LEAST_SIZE),
    }
    limits = (0.0 if layer.norm_eps is None else layer.norm_eps, layer.query_scale, layer.least_step, layer.most_step)
    gates = (given.steps, rates, given.steps.stride(0), layer.step_bias, layer.log_decay)
    row_stride, num_chunks = given.values.stride(0), table.chunks.shape[1]
    launch(
        chunk_kernel,
        (num_chunks, layer.num_heads),
        given.queries,
        given.keys,
        row_stride,
        *gates,
        table.chunks,
        num_chunks,
        solved,
        seen,
        *limits,
        **common,
        num_warps=2,
    )
    launch(
        carry_kernel,
        (layer.num_heads * triton.cdiv(layer.value_dim, _VALUE_BLOCK), table.num_sequences),
        given.queries,
        given.keys,
        given.values,
        row_stride,
        *gates,
        layer.log_decay if layer.skip is None else layer.skip,
        states.slots[:, states.offset :],
        states.slots.stride(0),
        table.sequences,
        table.stores,
        table.num_sequences,
        table.stores.shape[1],
        solved,
        seen,
        out,
        *limits,
        **common,
        value_dim=layer.value_dim,
        has_skip=layer.skip is not None,
        value_block=_VALUE_BLOCK,
        num_warps=4,
        num_stages=2,
    )
    return out
