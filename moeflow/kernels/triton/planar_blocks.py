"""Planar weights of the blocks of files. No value changes: codes and scales only change places."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
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
    "Q5_0": _Blocks("int8", 32, 22, 2),
    "IQ4_NL": _Blocks("int8", 32, 18, 2),
    "MXFP4": _Blocks("mxfp4", 32, 17, 1),
    "F8_E4M3": _Blocks("fp8", 128, 132, 4, group=128),
    "INT4_G128": _Blocks("int4-zero", 128, 132, 4, group=128),
    "INT4_G64": _Blocks("int4-zero", 64, 68, 4, group=64),
    "INT4_G32": _Blocks("int4-zero", 32, 36, 4),
    "INT8_G128": _Blocks("int8-zero", 128, 132, 4, group=128),
    "Q4_K": _Blocks("q4_k", SUPERBLOCK, 144, 4),
    "Q5_K": _Blocks("q5_k", SUPERBLOCK, 176, 4),
    "Q6_K": _Blocks("q6_k", SUPERBLOCK, 210, 128, group=16),
}


_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL


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
    match kind:
        case "Q4_K":
            return _q4_k(head, rest)
        case "Q5_K":
            return _q5_k(head, rest)
        case "Q6_K":
            return _q6_k(head, rest)
        case "Q8_0":
            values, scales = rest.flatten(2).view(torch.int8), head.contiguous().view(torch.float16)
        case "Q5_0":
            values, scales = _q5_0(rest), head.contiguous().view(torch.float16)
        case "IQ4_NL":
            values, scales = levels(_halves(rest).flatten(2)), head.contiguous().view(torch.float16)
        case "Q4_0":
            values, scales = words_of(_halves(rest).flatten(2), 4), head.contiguous().view(torch.float16)
        case "MXFP4":
            values, scales = words_of(_halves(rest).flatten(2), 4), head.contiguous()
        case "F8_E4M3":
            values, scales = rest.flatten(2), head.contiguous().view(torch.float32)
        case "INT8_G128":
            values, scales = rest.flatten(2), head.contiguous().view(torch.int32)
        case _:
            values, scales = words_of(rest.flatten(2), 4), head.contiguous().view(torch.int32)
    return PlanarWeights(weight_format, values, scales.flatten(2), group)


def _q5_0(rest: Tensor) -> Tensor:
    """Return integers from -16 to 15. 32 bits have the high bits of 32 codes, then bytes their low four."""
    high = torch.stack([rest[..., :4] >> shift & 1 for shift in range(8)], dim=-1).flatten(-2)
    return ((_halves(rest[..., 4:]) | high << 4).to(torch.int8) - 16).flatten(2)


def levels(codes: Tensor) -> Tensor:
    """Return the integers that codes of four bits stand for in IQ4_NL. A table would be a copy to the device."""
    values = torch.full_like(codes, _LEVELS[0], dtype=torch.int8)
    for code, (lower, level) in enumerate(pairwise(_LEVELS), start=1):
        values.add_(codes >= code, alpha=level - lower)
    return values


def _q4_k(head: Tensor, rest: Tensor) -> PlanarWeights:
    """32 bytes have two stretches of 32 codes."""
    return PlanarWeights("q4_k", words_of(_stretches(rest[..., 12:]), 4), _scales_of_k(head, rest))


def _q5_k(head: Tensor, rest: Tensor) -> PlanarWeights:
    """32 bytes before those have the high bits, a stretch in each bit."""
    high = torch.stack([rest[..., 12:44] >> shift & 1 for shift in range(8)], dim=-2).flatten(2)
    words = [words_of(codes, bits) for codes, bits in ((_stretches(rest[..., 44:]), 4), (high, 1))]
    return PlanarWeights("q5_k", torch.cat(words, dim=-1), _scales_of_k(head, rest))


def _stretches(low: Tensor) -> Tensor:
    pairs = low.view(*low.shape[:-1], 4, 32)
    return torch.stack([pairs & 15, pairs >> 4], dim=-2).flatten(2)


def _scales_of_k(head: Tensor, rest: Tensor) -> Tensor:
    """Scales and minima of six bits become bytes, next to each other."""
    low, middle, high = (rest[..., first : first + 4] for first in (0, 4, 8))
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    return _heads(head, torch.stack([scales, minima], dim=-1).flatten(-2))


def _q6_k(low: Tensor, rest: Tensor) -> PlanarWeights:
    """A half of a block has four stretches of 32: low bits in 64 bytes, two high bits of each in 32 bytes."""
    high, small, head = rest[..., :64], rest[..., 64:80], rest[..., 80:]
    lows = low.view(*low.shape[:-1], 2, 2, 32)  # half, stretch of a pair, column
    low_codes = torch.stack([lows & 15, lows >> 4], dim=-3)
    pairs = high.view(*high.shape[:-1], 2, 32)
    high_codes = torch.stack([pairs >> shift & 3 for shift in range(0, 8, 2)], dim=-2)
    words = [words_of(codes.flatten(2), bits) for codes, bits in ((low_codes, 4), (high_codes, 2))]
    return PlanarWeights("q6_k", torch.cat(words, dim=-1), _heads(torch.cat([head, head * 0], dim=-1), small), 16)


def _heads(head: Tensor, small: Tensor) -> Tensor:
    """Join four bytes and sixteen of each 256 columns to words: [slots, N, 5 K / 256] int32."""
    assert small.shape[-1] == SUPERBLOCK // 16
    return torch.cat([head, small], dim=-1).view(torch.int32).flatten(2)


def _parts(blocks: Tensor, num_bytes: int, num_head: int) -> tuple[Tensor, Tensor]:
    """Return the heads of blocks and their rest: [slots, N, blocks, bytes]."""
    rows = blocks.view(*blocks.shape[:-1], -1, num_bytes)
    return rows[..., :num_head], rows[..., num_head:]


def _halves(codes: Tensor) -> Tensor:
    """Return codes of blocks whose bytes have columns j in their low and 16 + j in their high half."""
    return torch.cat([codes & 15, codes >> 4], dim=-1)
