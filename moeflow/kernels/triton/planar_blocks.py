"""Planar weights of the blocks of files. No value changes: codes and scales only change places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.planar_weights import SUPERBLOCK, PlanarWeights, words_of
from moeflow.kernels.weight_format import BlockKind

if TYPE_CHECKING:
    from torch import Tensor

_GROUP_COLUMNS = {"INT4_G128": 128, "INT4_G64": 64, "INT4_G32": 32}
_HEAD_BYTES = 4  # of blocks of groups, before a byte for each value


def from_blocks(blocks: Tensor, kind: BlockKind) -> PlanarWeights | None:
    """Return the weights of rows of blocks, None for a kind that the kernels do not read.

    Shapes: blocks [slots, N, bytes of a row] uint8.
    """
    match kind:
        case "Q8_0":
            scales, values = _parts(blocks, 34, 2)
            return PlanarWeights("int8", values.flatten(2).view(torch.int8), _halves(scales))
        case "Q4_0":
            scales, codes = _parts(blocks, 18, 2)
            return PlanarWeights("int4", _words_of_halves(codes), _halves(scales))
        case "MXFP4":
            scales, codes = _parts(blocks, 17, 1)
            return PlanarWeights("mxfp4", _words_of_halves(codes), scales.flatten(2).contiguous())
        case "F8_E4M3":
            scales, values = _parts(blocks, _HEAD_BYTES + 128, _HEAD_BYTES)
            return PlanarWeights("fp8", values.flatten(2), scales.contiguous().view(torch.float32).flatten(2), 128)
        case "INT4_G128" | "INT4_G64" | "INT4_G32":
            group = _GROUP_COLUMNS[kind]
            heads, codes = _parts(blocks, _HEAD_BYTES + group, _HEAD_BYTES)
            words = words_of(codes.flatten(2).int(), 4)
            return PlanarWeights("int4-zero", words, heads.contiguous().view(torch.int32).flatten(2), group)
        case "Q4_K":
            return _q4_k(blocks)
        case "Q6_K":
            return _q6_k(blocks)
        case _:
            return None


def _q4_k(blocks: Tensor) -> PlanarWeights:
    """Scales and minima of six bits become bytes, next to each other. 32 bytes have two stretches of 32 codes."""
    head, rest = _parts(blocks, 144, 4)
    low, middle, high = (rest[..., first : first + 4] for first in (0, 4, 8))
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    small = torch.stack([scales, minima], dim=-1).flatten(-2)
    pairs = rest[..., 12:].view(*rest.shape[:-1], 4, 32)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-2).flatten(2)
    return PlanarWeights("q4_k", words_of(codes.int(), 4), _heads(head, small))


def _q6_k(blocks: Tensor) -> PlanarWeights:
    """A half of a block has four stretches of 32: low bits in 64 bytes, two high bits of each in 32 bytes."""
    low, rest = _parts(blocks, 210, 128)
    high, small, head = rest[..., :64], rest[..., 64:80], rest[..., 80:]
    lows = low.view(*low.shape[:-1], 2, 2, 32)  # half, stretch of a pair, column
    low_codes = torch.stack([lows & 15, lows >> 4], dim=-3)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high_codes = high.view(*high.shape[:-1], 2, 1, 32) >> shifts[:, None] & 3
    words = [words_of(codes.flatten(2).int(), bits) for codes, bits in ((low_codes, 4), (high_codes, 2))]
    return PlanarWeights("q6_k", torch.cat(words, dim=-1), _heads(torch.cat([head, head * 0], dim=-1), small), 16)


def _heads(head: Tensor, small: Tensor) -> Tensor:
    """Join four bytes and sixteen of each 256 columns to words: [slots, N, 5 K / 256] int32."""
    assert small.shape[-1] == SUPERBLOCK // 16
    return torch.cat([head, small], dim=-1).view(torch.int32).flatten(2)


def _parts(blocks: Tensor, num_bytes: int, num_head: int) -> tuple[Tensor, Tensor]:
    """Return the heads of blocks and their rest: [slots, N, blocks, bytes]."""
    rows = blocks.view(*blocks.shape[:-1], -1, num_bytes)
    return rows[..., :num_head], rows[..., num_head:]


def _halves(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.float16).flatten(2)


def _words_of_halves(codes: Tensor) -> Tensor:
    """Join codes of blocks whose bytes have columns j in their low and 16 + j in their high half."""
    return words_of(torch.cat([codes & 15, codes >> 4], dim=-1).flatten(2).int(), 4)
