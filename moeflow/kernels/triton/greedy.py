"""The likeliest token of each row of logits. The reference is `_greedy_row` in `kernels/sample.py`.

A program reads one row: 608 KB at 152,064 tokens. The output projection has just written them, so they are in the L2
cache. One multiprocessor reads 64 KB at a time there, which takes about 6 us. That is 0.4% of a pass that reads 3.3
billion weights in bfloat16 on an H200. Several programs a row would need a second launch, which costs as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK: Final = 16384  # logits at a time: 32 in each thread's registers, as 8 loads of 16 bytes
_WARP_VALUES: Final = 1024


@triton.jit
def greedy_kernel(logits_ptr, row_stride, vocab_size, tokens_ptr, block: tl.constexpr):
    """Store the first of the likeliest tokens of a row; -1 if the largest logit is no finite number.

    Shapes: logits [R, V] float32 in rows of `row_stride`; tokens [R] int64.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, block)
    infinity = float("inf")
    largest = tl.full([block], -infinity, tl.float32)
    tokens = places
    for first in range(0, vocab_size, block):
        here = first + places
        x = tl.load(logits_ptr + row * row_stride + here, mask=here < vocab_size, other=-infinity)
        x = tl.where(x == x, x, infinity)  # NaN
        is_larger = x > largest
        largest = tl.where(is_larger, x, largest)
        tokens = tl.where(is_larger, here, tokens)
    maximum = tl.max(largest, axis=0)
    token = tl.min(tl.where(largest == maximum, tokens, vocab_size), axis=0)
    is_finite = tl.abs(maximum) < infinity
    tl.store(tokens_ptr + row, tl.where(is_finite, token, -1).to(tl.int64))


def greedy(logits: Tensor) -> Tensor:
    """Return each row's likeliest token, -1 of a row without a finite maximum, in one launch.

    Shapes: [R, V] float32 -> [R] int64.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    block = min(triton.next_power_of_2(vocab_size), _BLOCK)
    num_warps = min(max(block // _WARP_VALUES, 1), 16)
    launch(greedy_kernel, (num_rows,), logits, logits.stride(0), vocab_size, tokens, block=block, num_warps=num_warps)
    return tokens
