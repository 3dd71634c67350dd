"""Random tokens of rows of logits, as `kernels/sample.py` defines them.

Each row is cut into chunks of 2,048 logits, so that one row keeps 75 programs busy at 152,064 tokens. The first launch
finds the chunks' largest logits, the second one sums their weights in float64. Then one program a row finds the token:
in the order of the vocabulary it reads one chunk again. Under top-k and top-p, torch selects the likeliest tokens by
keys that order equal logits, too. A row moves 1.8 MB or 0.4 us of an H200's memory, and 2.4 MB more for keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

WIDE: Final = -2  # in the place of a token: the nucleus has more tokens than were looked at
_CHUNK: Final = 2048
_NUM_FIELDS = tl.constexpr(6)  # of a row of the table
_LOW_BITS = tl.constexpr(0xFFFFFFFF)  # of a key: the token, counted from the end
_WIDE = tl.constexpr(WIDE)


@triton.jit
def load_weights(x, largest, table_ptr):
    """Return weights of logits relative to the largest, float64; zeros of no finite numbers.

    `table_ptr`: the row's fields. If the largest is no finite number, nor are the weights of use.
    """
    infinity = float("inf")
    x = tl.where(tl.abs(x) < infinity, x, -infinity)
    largest = tl.where(tl.abs(largest) < infinity, largest, 0.0)
    return tl.exp((x - largest) * tl.load(table_ptr + 1).to(tl.float32)).to(tl.float64)


@triton.jit
def inverted(weights, before, total, number):
    """Return where the cumulative weight first exceeds a number's share of the total; else the last with a weight.

    Shapes: weights [n] float64, which begin where the cumulative weight is `before`.
    """
    places = tl.arange(0, weights.shape[0])
    before_total = (tl.maximum(total.to(tl.int64, bitcast=True), 1) - 1).to(tl.float64, bitcast=True)
    share = tl.minimum(number * total, before_total)  # however the product rounds
    is_beyond = before + tl.cumsum(weights, axis=0) > share
    first = tl.min(tl.where(is_beyond, places, weights.shape[0]), axis=0)
    last = tl.max(tl.where(weights > 0.0, places, 0), axis=0)
    return tl.minimum(first, last)


@triton.jit
def chunk_maxima_kernel(logits_ptr, row_stride, vocab_size, table_ptr, maxima_ptr, chunk: tl.constexpr):
    """Store the largest logit of one row and chunk; infinity if there is a NaN.

    Shapes: logits [R, V] float32 in rows of `row_stride`; table [n, fields] float64; maxima [n, chunks].
    """
    row = tl.program_id(0)
    tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
    first = tl.load(table_ptr + row * _NUM_FIELDS).to(tl.int64) * row_stride
    x = tl.load(logits_ptr + first + tokens, mask=tokens < vocab_size, other=-float("inf"))
    largest = tl.max(tl.where(x == x, x, float("inf")), axis=0)
    tl.store(maxima_ptr + row * tl.num_programs(1) + tl.program_id(1), largest)


@triton.jit(do_not_specialize=["num_in_order"])
def chunk_sums_kernel(
    logits_ptr,
    row_stride,
    vocab_size,
    table_ptr,
    num_in_order,
    maxima_ptr,
    sums_ptr,
    keys_ptr,
    chunk: tl.constexpr,
    chunk_block: tl.constexpr,
):
    """Sum the weights of one row and chunk. In the first rows, only weights of tokens that may be drawn count.

    Other rows also get keys, in the order of logits, and of equals first those of higher tokens.
    Shapes: sums [n, chunks] float64; keys [n - num_in_order, V] int64.
    """
    row = tl.program_id(0)
    num_chunks = tl.num_programs(1)
    tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
    chunks = tl.arange(0, chunk_block)
    is_inside = tokens < vocab_size
    table_ptr += row * _NUM_FIELDS
    first = tl.load(table_ptr).to(tl.int64) * row_stride
    maxima = tl.load(maxima_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf"))
    x = tl.load(logits_ptr + first + tokens, mask=is_inside, other=-float("inf"))
    weights = load_weights(x, tl.max(maxima, axis=0), table_ptr)
    if row < num_in_order:
        weights = tl.where(weights < tl.load(table_ptr + 4), 0.0, weights)
    else:
        bits = (x + 0.0).to(tl.int32, bitcast=True)  # without negative zeros
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        keys = (ordered << 32) | (_LOW_BITS - tokens.to(tl.int64))
        tl.store(keys_ptr + (row - num_in_order).to(tl.int64) * vocab_size + tokens, keys, mask=is_inside)
    tl.store(sums_ptr + row * num_chunks + tl.program_id(1), tl.sum(weights, axis=0))


@triton.jit
def draw_in_order_kernel(
    logits_ptr,
    row_stride,
    vocab_size,
    table_ptr,
    num_chunks,
    maxima_ptr,
    sums_ptr,
    tokens_ptr,
    chunk: tl.constexpr,
    chunk_block: tl.constexpr,
):
    """Store the token of a row whose tokens count in the order of the vocabulary; -1 without a finite maximum."""
    row = tl.program_id(0)
    chunks = tl.arange(0, chunk_block)
    is_chunk = chunks < num_chunks
    table_ptr += row * _NUM_FIELDS
    number = tl.load(table_ptr + 5)
    largest = tl.max(tl.load(maxima_ptr + row * num_chunks + chunks, mask=is_chunk, other=-float("inf")), axis=0)
    sums = tl.load(sums_ptr + row * num_chunks + chunks, mask=is_chunk, other=0.0)
    ends = tl.cumsum(sums, axis=0)
    total = tl.max(ends, axis=0)
    found = inverted(sums, 0.0, total, number)
    before = tl.max(tl.where(chunks < found, ends, 0.0), axis=0)
    tokens = found * chunk + tl.arange(0, chunk)
    first = tl.load(table_ptr).to(tl.int64) * row_stride
    x = tl.load(logits_ptr + first + tokens, mask=tokens < vocab_size, other=-float("inf"))
    weights = load_weights(x, largest, table_ptr)
    weights = tl.where(weights < tl.load(table_ptr + 4), 0.0, weights)
    token = found * chunk + inverted(weights, before, total, number)
    tl.store(tokens_ptr + row, tl.where(tl.abs(largest) < float("inf"), token, -1).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["table_ptr", "maxima_ptr", "sums_ptr", "tokens_ptr"])
def draw_in_ranks_kernel(
    keys_ptr,
    vocab_size,
    table_ptr,
    num_chunks,
    maxima_ptr,
    sums_ptr,
    tokens_ptr,
    width: tl.constexpr,
    block: tl.constexpr,
    chunk_block: tl.constexpr,
):
    """Store the token of a row whose likeliest tokens come first; -1 without a finite maximum; -2 of a wide nucleus.

    Shapes: keys [n, width] int64, highest first; table, maxima and sums of the same rows.
    """
    row = tl.program_id(0)
    chunks = tl.arange(0, chunk_block)
    ranks = tl.arange(0, block)
    is_chunk = chunks < num_chunks
    table_ptr += row * _NUM_FIELDS
    top_k, top_p, least = tl.load(table_ptr + 2), tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    largest = tl.max(tl.load(maxima_ptr + row * num_chunks + chunks, mask=is_chunk, other=-float("inf")), axis=0)
    mass = tl.sum(tl.load(sums_ptr + row * num_chunks + chunks, mask=is_chunk, other=0.0), axis=0)
    keys = tl.load(keys_ptr + row * width + ranks, mask=ranks < width, other=0)
    ordered = (keys >> 32).to(tl.int32)
    x = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    num_ranked = tl.where(top_k > 0, tl.minimum(top_k, width), width).to(tl.int32)
    weights = tl.where(ranks < num_ranked, load_weights(x, largest, table_ptr), 0.0)
    seen = tl.sum(weights, axis=0)
    needed = top_p * tl.where(top_k > 0, seen, mass)
    most_before = tl.where(top_p < 1.0, needed, float("inf"))
    is_outside = (weights < least) | (tl.cumsum(weights, axis=0) - weights >= most_before)
    weights = tl.where(is_outside & (ranks > 0), 0.0, weights)
    rank = inverted(weights, 0.0, tl.max(tl.cumsum(weights, axis=0), axis=0), tl.load(table_ptr + 5))
    token = tl.sum(tl.where(ranks == rank, _LOW_BITS - (keys & _LOW_BITS), 0), axis=0)
    token = tl.where((seen < needed) & (width < vocab_size), _WIDE, token)
    tl.store(tokens_ptr + row, tl.where(tl.abs(largest) < float("inf"), token, -1))


def draw(logits: Tensor, table: Tensor, num_in_order: int, nucleus_width: int) -> Tensor:
    """Return a token for each row of a table, in two launches and one for each kind of rows; torch selects besides.

    The first rows' tokens count in the order of the vocabulary. Others have top-k, at most `nucleus_width`, or top-p.
    `WIDE` stands for a token where more than the `nucleus_width` likeliest ones count.
    Shapes: logits [R, V] float32; table [n, 6] float64: row, inverse temperature, top_k, top_p, least weight, number
    -> [n] int64.
    """
    num_rows, vocab_size = len(table), logits.shape[1]
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    sizes = {"chunk": _CHUNK, "num_warps": 4}
    chunk_block = triton.next_power_of_2(num_chunks)
    row_stride = logits.stride(0)
    device = logits.device
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    sums = torch.empty(num_rows, num_chunks, dtype=torch.float64, device=device)
    keys = torch.empty(num_rows - num_in_order, vocab_size, dtype=torch.int64, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    grid = (num_rows, num_chunks)
    launch(chunk_maxima_kernel, grid, logits, row_stride, vocab_size, table, maxima, **sizes)
    launch(
        chunk_sums_kernel,
        grid,
        logits,
        row_stride,
        vocab_size,
        table,
        num_in_order,
        maxima,
        sums,
        keys,
        **sizes,
        chunk_block=chunk_block,
    )
    if num_in_order:
        launch(
            draw_in_order_kernel,
            (num_in_order,),
            logits,
            row_stride,
            vocab_size,
            table,
            num_chunks,
            maxima,
            sums,
            tokens,
            **sizes,
            chunk_block=chunk_block,
        )
    if num_in_order < num_rows:
        width = min(nucleus_width, vocab_size)
        launch(
            draw_in_ranks_kernel,
            (num_rows - num_in_order,),
            keys.topk(width, dim=1).values,
            vocab_size,
            table[num_in_order:],
            num_chunks,
            maxima[num_in_order:],
            sums[num_in_order:],
            tokens[num_in_order:],
            width=width,
            block=triton.next_power_of_2(width),
            chunk_block=chunk_block,
            num_warps=4,
        )
    return tokens
