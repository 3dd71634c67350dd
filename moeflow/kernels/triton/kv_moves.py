"""Moves keys and values of drafted tokens to where the next pass looks for them. The reference is `KVBlocks.move`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moeflow.kernels.triton.kv_cache import cell_pointers
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.attention.kv_blocks import KVBlocks


@triton.jit(do_not_specialize=["num_moves"])
def move_kv_kernel(
    from_ptr,
    to_ptr,
    num_moves,
    cells_ptr,
    scales_ptr,
    num_kv_heads,
    head_dim,
    block_size: tl.constexpr,
    is_latent: tl.constexpr,
    is_int8: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Copy one head of tokens to other slots, one token after another. Shapes: from and to [n]."""
    head = tl.program_id(0)
    dims = tl.arange(0, block_dim)
    is_inside = dims < head_dim
    half = block_size * head_dim
    values_at = 0 if is_latent else half
    numbers = values_at + half
    size = numbers + 8 * block_size if is_int8 else numbers  # four bytes of each scale
    for move in range(num_moves):
        source = tl.load(from_ptr + move)
        target = tl.load(to_ptr + move)
        from_cell = (source // block_size * num_kv_heads + head) * size
        to_cell = (target // block_size * num_kv_heads + head) * size
        from_offset, to_offset = source % block_size, target % block_size
        if not is_latent:
            keys = tl.load(cells_ptr + from_cell + from_offset + dims * block_size, mask=is_inside)
            tl.store(cells_ptr + to_cell + to_offset + dims * block_size, keys, mask=is_inside)
        values = tl.load(cells_ptr + from_cell + values_at + from_offset * head_dim + dims, mask=is_inside)
        tl.store(cells_ptr + to_cell + values_at + to_offset * head_dim + dims, values, mask=is_inside)
        if is_int8:
            scales = tl.arange(0, 2) * block_size
            of_token = tl.load(scales_ptr + (from_cell + numbers) // 4 + from_offset + scales)
            tl.store(scales_ptr + (to_cell + numbers) // 4 + to_offset + scales, of_token)
        tl.debug_barrier()  # the next move may read what other threads of this program have stored


def move_kv(blocks: KVBlocks, from_slots: Tensor, to_slots: Tensor) -> None:
    """Copy K and V of tokens to other slots, one after another, in one launch. Shapes: [n] int64."""
    launch(
        move_kv_kernel,
        (blocks.num_kv_heads,),
        from_slots,
        to_slots,
        len(from_slots),
        *cell_pointers(blocks),
        blocks.num_kv_heads,
        blocks.head_dim,
        block_size=blocks.block_size,
        is_latent=blocks.latent_dim > 0,
        is_int8=blocks.dtype == "int8",
        block_dim=triton.next_power_of_2(blocks.head_dim),
        num_warps=1,
    )
