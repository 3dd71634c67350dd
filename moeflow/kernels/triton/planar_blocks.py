"""Planar weights of the blocks of files. No value changes: codes and scales only change places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.planar_weights import GROUP, SUPERBLOCK, PlanarFormat, PlanarWeights, words_of
from moeflow.kernels.weight_format import BlockKind

if TYPE_CHECKING:
    from torch import Tensor


class _Blocks(NamedTuple):
    """The sizes of a kind of blocks, and the format that they become."""

    format: PlanarFormat
    num_columns: int
    num_bytes: int
    num_head: int  # bytes before those of values, except in Q6_K
    group: int = GROUP


_KINDS: Final[Mapping[str, _Blocks]] = {
    "Q8_0": _Blocks("int8", 32, 34, 2),
    "Q4_0": _Blocks("int4", 32, 18, 2),
    "MXFP4": _Blocks("mxfp4", 32, 17, 1),
    "F8_E4M3": _Blocks("fp8", 128, 132, 4, group=128),
    "INT4_G128": _Blocks("int4-zero", 128, 132, 4, group=128),
    "INT4_G64": _Blocks("int4-zero", 64, 68, 4, group=64),
    "INT4_G32": _Blocks("int4-zero", 32, 36, 4),
    "Q4_K": _Blocks("q4_k", SUPERBLOCK, 144, 4),
    "Q6_K": _Blocks("q6_k", SUPERBLOCK, 210, 128, group=16),
}


def keeps(weights: PlanarWeights, kind: str) -> bool:
    """Return whether weights take blocks of a kind, and no value changes. "int8" takes those of "int4", too."""
    found = _KINDS.get(kind)
    if found is None or found.group != weights.group:
        return False
    return found.format == weights.format or (found.format, weights.format) == ("int4", "int8")


def row_bytes(kind: BlockKind, num_columns: int) -> int:
    """Return the bytes of a row of blocks."""
    blocks = _KINDS[kind]
    assert num_columns % blocks.num_columns == 0, "refused before"
    return num_columns // blocks.num_columns * blocks.num_bytes


def from_blocks(blocks: Tensor, kind: BlockKind) -> PlanarWeights:
    """Return the weights of rows of blocks, which the kernels read. Shapes: blocks [slots, N, bytes of a row] uint8."""
    weight_format, _, num_bytes, num_head, group = _KINDS[kind]
    head, rest = _parts(blocks, num_bytes, num_head)
    match weight_format:
        case "q4_k":
            return _q4_k(head, rest)
        case "q6_k":
            return _q6_k(head, rest)
        case "int8":
            values, scales = rest.flatten(2).view(torch.int8), head.contiguous().view(torch.float16)
        case "int4":
            values, scales = _words_of_halves(rest), head.contiguous().view(torch.float16)
        case "mxfp4":
            values, scales = _words_of_halves(rest), head.contiguous()
        case "fp8":
            values, scales = rest.flatten(2), head.contiguous().view(torch.float32)
        case "int4-zero":
            values, scales = words_of(rest.flatten(2).int(), 4), head.contiguous().view(torch.int32)
    return PlanarWeights(weight_format, values, scales.flatten(2), group)


def _q4_k(head: Tensor, rest: Tensor) -> PlanarWeights:
    """Scales and minima of six bits become bytes, next to each other. 32 bytes have two stretches of 32 codes."""
    low, middle, high = (rest[..., first : first + 4] for first in (0, 4, 8))
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    small = torch.stack([scales, minima], dim=-1).flatten(-2)
    pairs = rest[..., 12:].view(*rest.shape[:-1], 4, 32)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-2).flatten(2)
    return PlanarWeights("q4_k", words_of(codes.int(), 4), _heads(head, small))


def _q6_k(low: Tensor, rest: Tensor) -> PlanarWeights:
    """A half of a block has four stretches of 32: low bits in 64 bytes, two high bits of each in 32 bytes."""
    high, small, head = rest[..., :64], rest[..., 64:80], rest[..., 80:]
    lows = low.view(*low.shape[:-1], 2, 2, 32)  # half, stretch of a pair, column
    low_codes = torch.stack([lows & 15, lows >> 4], dim=-3)
    pairs = high.view(*high.shape[:-1], 2, 32)
    high_codes = torch.stack([pairs >> shift & 3 for shift in range(0, 8, 2)], dim=-2)
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


def _words_of_halves(codes: Tensor) -> Tensor:
    """Join codes of blocks whose bytes have columns j in their low and 16 + j in their high half."""
    return words_of(torch.cat([codes & 15, codes >> 4], dim=-1).flatten(2).int(), 4)
