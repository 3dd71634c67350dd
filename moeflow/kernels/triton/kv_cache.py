"""Stores keys and values in the cells of the paged cache. Layout and reference: `kernels/attention/kv_blocks.py`.

A cell belongs to a block and a KV head: keys transposed [D, block_size], then values [block_size, D]. int8 cells end
with float32 scales of keys and values. A latent cell has rows [block_size, D] alone; its scales belong to the first L
dimensions, then to the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.attention.kv_blocks import KVBlocks

_TINY = tl.constexpr(1e-30)  # as in the reference: rows below this become zero as int8
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no fraction, and halves go to even numbers


@triton.jit
def quantized(x):
    """Return rows as whole numbers from -127 to 127 and their scales. Shapes: x [N, D] float32 -> [N, D], [N]."""
    largest = tl.max(tl.abs(x), axis=1)
    is_tiny = largest <= _TINY
    inverse = tl.where(is_tiny, 0.0, tl.div_rn(tl.zeros_like(largest) + 127.0, tl.where(is_tiny, 1.0, largest)))
    return (x * inverse[:, None] + _ROUNDING) - _ROUNDING, tl.div_rn(largest, tl.zeros_like(largest) + 127.0)


@triton.jit
def store_rows(cells_ptr, scales_ptr, x, firsts, steps, scale_places, is_row, is_value, is_int8: tl.constexpr):
    """Store rows of float32: number d of row n at `firsts[n] + d * steps`, an int8 row's scale at `scale_places[n]`.

    Shapes: x and is_value [N, D]; firsts, scale_places and is_row [N]; steps [D].
    """
    if is_int8:
        x, scales = quantized(x)
        tl.store(scales_ptr + scale_places, scales, mask=is_row)
    places = firsts[:, None] + steps[None, :]
    tl.store(cells_ptr + places, x.to(cells_ptr.dtype.element_ty), mask=is_row[:, None] & is_value)


@triton.jit
def store_kv(
    cells_ptr,
    scales_ptr,
    x,
    slot,
    heads,
    num_kv_heads,
    head_dim,
    is_row,
    is_value,
    are_values: tl.constexpr,
    block_size: tl.constexpr,
    is_int8: tl.constexpr,
):
    """Store the keys, or the values, of one token and some heads. Shapes: x and is_value [N, D]; heads, is_row [N]."""
    cells = slot // block_size * num_kv_heads + heads
    offset = slot % block_size
    half = block_size * head_dim
    scale_places = cells * 0
    size = 2 * half
    if is_int8:  # four bytes of each scale
        size += 8 * block_size
        scale_places = (cells * size + 2 * half) // 4 + offset
    columns = tl.arange(0, x.shape[1])
    if are_values:
        scale_places += block_size
        firsts = cells * size + half + offset * head_dim
        store_rows(cells_ptr, scales_ptr, x, firsts, columns, scale_places, is_row, is_value, is_int8)
    else:
        firsts = cells * size + offset
        store_rows(cells_ptr, scales_ptr, x, firsts, columns * block_size, scale_places, is_row, is_value, is_int8)


@triton.jit
def store_latent(
    cells_ptr,
    scales_ptr,
    latent,
    rest,
    slot,
    latent_dim,
    head_dim,
    is_latent,
    is_rest,
    block_size: tl.constexpr,
    is_int8: tl.constexpr,
):
    """Store one token's latent and the rest of its key. Shapes: latent, is_latent [1, L']; rest, is_rest [1, R']."""
    size = block_size * head_dim
    offset = slot % block_size
    if is_int8:
        size += 8 * block_size
    cell = slot // block_size * size + tl.zeros([1], tl.int64)
    first = cell + offset * head_dim
    scale_place = (cell + block_size * head_dim) // 4 + offset
    is_row = first == first  # every row
    latents = tl.arange(0, latent.shape[1])
    store_rows(cells_ptr, scales_ptr, latent, first, latents, scale_place, is_row, is_latent, is_int8)
    others = tl.arange(0, rest.shape[1])
    store_rows(
        cells_ptr, scales_ptr, rest, first + latent_dim, others, scale_place + block_size, is_row, is_rest, is_int8
    )


@triton.jit
def write_kv_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    cells_ptr,
    scales_ptr,
    k_stride,
    v_stride,
    num_kv_heads,
    head_dim,
    latent_dim,
    block_size: tl.constexpr,
    is_latent: tl.constexpr,
    is_int8: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
    block_rest: tl.constexpr,
):
    """Store K and V of token `program_id(0)`: k and v [T, KV, D], slots [T]; of some heads, or a latent key's parts."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    dims = tl.arange(0, block_dim)[None, :]
    if is_latent:
        rest_dims = tl.arange(0, block_rest)[None, :]
        is_rest = rest_dims < head_dim - latent_dim
        k_ptr += token * k_stride
        latent = tl.load(k_ptr + dims, mask=dims < latent_dim, other=0.0).to(tl.float32)
        rest = tl.load(k_ptr + latent_dim + rest_dims, mask=is_rest, other=0.0).to(tl.float32)
        store_latent(
            cells_ptr,
            scales_ptr,
            latent,
            rest,
            slot,
            latent_dim,
            head_dim,
            dims < latent_dim,
            is_rest,
            block_size,
            is_int8,
        )
    else:
        heads = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
        is_row = heads < num_kv_heads
        is_value = is_row[:, None] & (dims < head_dim)
        places = heads[:, None] * head_dim + dims
        k = tl.load(k_ptr + token * k_stride + places, mask=is_value, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_stride + places, mask=is_value, other=0.0).to(tl.float32)
        store_kv(
            cells_ptr, scales_ptr, k, slot, heads, num_kv_heads, head_dim, is_row, is_value, False, block_size, is_int8
        )
        store_kv(
            cells_ptr, scales_ptr, v, slot, heads, num_kv_heads, head_dim, is_row, is_value, True, block_size, is_int8
        )


def write_kv(k: Tensor, v: Tensor | None, blocks: KVBlocks, slots: Tensor) -> None:
    """Store K and V of tokens, or K alone where values are a part of it, in one launch; nothing where a slot is < 0.

    Shapes: k and v [T, KV, D], slots [T] int64.
    """
    k, v = rows_of_heads(k), k if v is None else rows_of_heads(v)
    latent_dim, head_dim = blocks.latent_dim, blocks.head_dim
    block_dim = triton.next_power_of_2(latent_dim or head_dim)
    block_heads = heads_of_program(blocks.num_kv_heads, block_dim)
    launch(
        write_kv_kernel,
        (len(k), 1 if latent_dim else triton.cdiv(blocks.num_kv_heads, block_heads)),
        k,
        v,
        slots,
        *cell_pointers(blocks),
        k.stride(0),
        v.stride(0),
        blocks.num_kv_heads,
        head_dim,
        latent_dim,
        block_size=blocks.block_size,
        is_latent=latent_dim > 0,
        is_int8=blocks.dtype == "int8",
        block_heads=block_heads,
        block_dim=block_dim,
        block_rest=triton.next_power_of_2(head_dim - latent_dim),
        num_warps=1,
        enable_fp_fusion=False,  # int8 numbers are rounded as in the reference
    )


def cell_pointers(blocks: KVBlocks) -> tuple[Tensor, Tensor]:
    """Return the cells as numbers of their type, and as float32 for scales."""
    storage: Any = blocks.storage
    cells = storage.view(getattr(torch, blocks.dtype))
    return cells, storage.view(torch.float32) if blocks.dtype == "int8" else cells


def heads_of_program(num_heads: int, block_dim: int) -> int:
    """Return how many heads a program of one warp takes: 16 numbers a lane, whatever the number of tokens."""
    return int(min(max(512 // block_dim, 1), triton.next_power_of_2(num_heads)))


def rows_of_heads(x: Tensor) -> Tensor:
    """Return x [T, heads, D] with the heads of each token one after another; the tokens may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
