"""cos and sin of a pass's rotary positions, one program for each token. The reference is `kernels/rotary.py`.

Angles are products in float32, as models learnt them. Their cos and sin are computed in float64: the approximate
instructions for float32 are wrong for the angles of long contexts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def rotary_table_kernel(
    positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, num_pairs, scale: tl.constexpr, block: tl.constexpr
):
    """Fill the rows of token `program_id(0)`: positions [T], frequencies [R/2], cos and sin [T, R]."""
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, block)
    is_inside = pairs < num_pairs
    position = tl.load(positions_ptr + token).to(tl.float32)
    angles = (position * tl.load(frequencies_ptr + pairs, mask=is_inside, other=0.0)).to(tl.float64)
    factor = tl.full([block], scale, tl.float64)
    dtype: tl.constexpr = cos_ptr.dtype.element_ty
    cos = (tl.cos(angles) * factor).to(tl.float32).to(dtype)
    sin = (tl.sin(angles) * factor).to(tl.float32)
    first = token * 2 * num_pairs + pairs
    tl.store(cos_ptr + first, cos, mask=is_inside)
    tl.store(cos_ptr + first + num_pairs, cos, mask=is_inside)
    tl.store(sin_ptr + first, (-sin).to(dtype), mask=is_inside)
    tl.store(sin_ptr + first + num_pairs, sin.to(dtype), mask=is_inside)


def rotary_table(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin for each token in one launch, the first half of sin negated.

    Shapes: positions [T] int64, frequencies [R/2] float32 -> cos, sin [T, 1, R].
    """
    num_pairs = len(frequencies)
    shape = (len(positions), 1, 2 * num_pairs)
    cos, sin = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
    block = triton.next_power_of_2(num_pairs)
    launch(
        rotary_table_kernel,
        (len(positions),),
        positions,
        frequencies,
        cos,
        sin,
        num_pairs,
        scale=scale,
        block=block,
        num_warps=min(max(block // 32, 1), 4),
    )
    return cos, sin
