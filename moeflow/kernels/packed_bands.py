"""From the CPU kernels' layout of experts to that of the GPU kernels, by torch on any device.

A band of 16 rows has first 16-bit numbers, one a row, then lines of 16 words, one a row (csrc/formats/formats.h). So
all formats need the same exchange of two axes. Then codes and scales change places, but no value changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import matrix_bytes, whole_bands
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.planar_blocks import levels
from moeflow.kernels.triton.planar_rows import made_format
from moeflow.kernels.triton.planar_weights import GROUP, PlanarFormat, PlanarWeights, pack
from moeflow.kernels.weight_format import BAND, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

PlainMatrices: TypeAlias = "Tensor | PlanarWeights"  # [n, rows, cols], as GPU kernels read them


class _Groups(NamedTuple):
    """The contents of a row for each group of columns, and the format that they become."""

    num_columns: int
    num_numbers: int  # of 16 bits
    num_words: int
    format: PlanarFormat | None = None  # None: a tensor
    group: int = GROUP  # columns that share a scale

    def num_groups(self, cols: int) -> int:
        """Return the groups of a row, the last one filled up."""
        return -(-cols // self.num_columns)


_GROUPS: Final[Mapping[str, _Groups]] = {
    "float32": _Groups(32, 0, 32),
    "bfloat16": _Groups(32, 0, 16),
    "int8": _Groups(32, 1, 8, "int8"),
    "int4": _Groups(32, 1, 4, "int4"),
    "mxfp4": _Groups(64, 1, 8, "mxfp4"),
    "fp8": _Groups(128, 2, 32, "fp8", 128),
    "q5_0": _Groups(32, 1, 5, "int8"),
    "iq4_nl": _Groups(32, 1, 4, "int8"),
    "q4_k": _Groups(256, 10, 32, "q4_k"),
    "q5_k": _Groups(256, 10, 40, "q5_k"),
    "q6_k": _Groups(256, 9, 48, "q6_k", 16),
    "int8-g128": _Groups(128, 2, 32, "int8-zero", 128),
    "int4-g128": _Groups(128, 2, 16, "int4-zero", 128),
    "int4-g64": _Groups(128, 3, 16, "int4-zero", 64),
    "int4-g32": _Groups(128, 6, 16, "int4-zero"),
}
FORMATS: Final = tuple(_GROUPS)  # that have a way to the GPU
# Packed words interleave codes. Exchanges of bits of a code's place in its word bring codes of so many bits in order.
_EXCHANGES: Final[Mapping[int, tuple[tuple[int, int], ...]]] = {
    4: ((0, 1), (1, 2)),
    2: ((0, 2), (1, 3)),
    1: ((2, 4), (1, 3), (0, 2), (0, 1)),
}


class ExpertLayout(msgspec.Struct, frozen=True):
    """The layout of one packed expert."""

    hidden: int
    width: int
    num_ups: int
    up_format: WeightFormat
    down_format: WeightFormat

    @classmethod
    def of(cls, experts: PackedExperts) -> ExpertLayout:
        """Return that of packed experts."""
        return cls(experts.hidden, experts.width, experts.kind.num_ups, experts.format, experts.down_format)

    @property
    def up_bytes(self) -> int:
        """Bytes of gate and up."""
        return matrix_bytes(self.up_format, self.num_ups * whole_bands(self.width), self.hidden)

    @property
    def num_bytes(self) -> int:
        """Bytes of the expert."""
        return self.up_bytes + matrix_bytes(self.down_format, self.hidden, self.width)

    def plain(self, packed: Tensor) -> tuple[PlainMatrices, PlainMatrices]:
        """Return the matrices of experts: gate_up [n, 2I, H] (gate rows first) or [n, I, H], and down [n, H, I].

        Shapes: packed [n, num_bytes] uint8, on any device.
        """
        ups, downs = packed[:, : self.up_bytes], packed[:, self.up_bytes : self.num_bytes]
        return (
            _plain(ups, self.up_format, self.num_ups, self.width, self.hidden),
            _plain(downs, self.down_format, 1, self.hidden, self.width),
        )


def empty_like(matrices: PlainMatrices, count: int) -> PlainMatrices:
    """Return memory for so many matrices of the same kind. Raises: RuntimeError from torch."""
    if isinstance(matrices, PlanarWeights):
        values, scales = (_memory(each, count) for each in (matrices.values, matrices.scales))
        return PlanarWeights(matrices.format, values, scales, matrices.group)
    return _memory(matrices, count)


def _memory(like: Tensor, count: int) -> Tensor:
    return torch.empty((count, *like.shape[1:]), dtype=like.dtype, device=like.device)


def store(matrices: PlainMatrices, slots: PlainMatrices, first: int) -> None:
    """Write matrices to consecutive slots, in the slots' format."""
    if isinstance(slots, PlanarWeights):
        if not isinstance(matrices, PlanarWeights) or (matrices.format, matrices.group) != (slots.format, slots.group):
            matrices = pack(_values(matrices), made_format(slots.format))
        place = slice(first, first + len(matrices))
        slots.values[place].copy_(matrices.values)
        slots.scales[place].copy_(matrices.scales)
    else:
        values = _values(matrices)
        slots[first : first + len(values)].copy_(values)


def _values(matrices: PlainMatrices) -> Tensor:
    """Return the exact values: [n, rows, cols]."""
    if isinstance(matrices, PlanarWeights):
        return torch.stack([matrices[number] for number in range(len(matrices))])
    return matrices


def _plain(packed: Tensor, weight_format: WeightFormat, num_parts: int, rows: int, cols: int) -> PlainMatrices:
    """Return matrices of `num_parts` parts, whose bands alternate: [n, num_parts * rows, cols]."""
    groups = _GROUPS[weight_format]
    count, num_bands = groups.num_groups(cols), num_parts * whole_bands(rows) // BAND
    bands = packed.reshape(len(packed), num_bands, -1)
    lines = bands[..., bands.shape[2] - 4 * BAND * count * groups.num_words :]
    words = _rows_of(lines.contiguous().view(torch.int32), num_parts, rows)
    if groups.format is None:
        return words.view(getattr(torch, weight_format))[..., :cols].contiguous()
    numbers = bands[..., : 2 * BAND * count * groups.num_numbers].contiguous().view(torch.int16)
    values = _values_plane(words, weight_format, cols)
    scales = _scales_plane(_rows_of(numbers, num_parts, rows), groups, cols)
    return PlanarWeights(groups.format, values, scales, groups.group)


def _rows_of(lines: Tensor, num_parts: int, rows: int) -> Tensor:
    """Return the rows part by part, without filling: [n, bands, m * 16] -> [n, num_parts * rows, m]."""
    number = len(lines)
    banded = lines.view(number, lines.shape[1] // num_parts, num_parts, -1, BAND).permute(0, 2, 1, 4, 3)
    parts = banded.reshape(number, num_parts, lines.shape[1] // num_parts * BAND, -1)
    flat = parts[:, :, :rows].reshape(-1)  # so that the last axis has a step of 1, even if it has one element
    return flat.view(number, num_parts * rows, -1)


def _values_plane(words: Tensor, weight_format: WeightFormat, cols: int) -> Tensor:
    """Return values as `PlanarWeights` has them. Shapes: words [n, rows, words of a row] int32."""
    match weight_format:
        case "int8":
            return words.view(torch.int8)[..., :cols].contiguous()
        case "int8-g128":
            return words.view(torch.uint8)[..., :cols].contiguous()
        case "fp8":  # a word has the third, first, fourth and second one
            third, first, fourth, second = _in_groups(words.view(torch.uint8), 4).unbind(-1)
            return torch.stack((first, second, third, fourth), dim=-1).flatten(-2)[..., :cols].contiguous()
        case "q5_k" | "q6_k":
            return torch.cat(_low_and_high(words, num_high=1 if weight_format == "q5_k" else 2), dim=-1)
        case "q5_0":
            low, high = (it.view(torch.uint8) for it in _low_and_high(words, num_high=1))
            codes = _codes(low, 4).bitwise_or_(_codes(high, 1).bitwise_left_shift_(4))
            return codes.view(torch.int8).sub_(16)[..., :cols].contiguous()
        case "iq4_nl":
            return levels(_codes(_in_order(words, 4).view(torch.uint8), 4))[..., :cols].contiguous()
        case _:
            return _in_order(words, 4)[..., : cols // 8].contiguous()


def _low_and_high(words: Tensor, num_high: int) -> tuple[Tensor, Tensor]:
    """Return words in order: those with the four low bits of all codes, and those with so many high bits."""
    low, high = torch.split(_in_groups(words, 4 + num_high), [4, num_high], dim=-1)
    return _in_order(low.flatten(-2), 4), _in_order(high.flatten(-2), num_high)


def _codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes in bytes, the first lowest. Shapes: [.., n] uint8 -> [.., n * 8 / bits] uint8."""
    codes = packed.new_empty((*packed.shape, 8 // bits))
    for place in range(8 // bits):
        codes[..., place] = packed >> bits * place & (1 << bits) - 1
    return codes.flatten(-2)


def _scales_plane(numbers: Tensor, groups: _Groups, cols: int) -> Tensor:
    """Return scales as `PlanarWeights` has them. Shapes: numbers [n, rows, numbers of a row] int16."""
    match groups.format:
        case "mxfp4":
            return numbers.view(torch.uint8)[..., : cols // GROUP].contiguous()
        case "fp8":
            return numbers.view(torch.float32)
        case "q4_k" | "q5_k":
            return numbers.view(torch.int32)
        case "q6_k":  # a word begins with the only number of 16 bits
            first, small = torch.split(_in_groups(numbers, groups.num_numbers), [1, groups.num_numbers - 1], dim=-1)
            return torch.cat((first, torch.zeros_like(first), small), dim=-1).flatten(-2).view(torch.int32)
        case "int4-zero" | "int8-zero":
            return _scales_and_zeros(numbers, groups)[..., : cols // groups.group].contiguous()
        case _:
            return numbers.view(torch.float16)


def _scales_and_zeros(numbers: Tensor, groups: _Groups) -> Tensor:
    """Return words of a scale, a zero point, and the mark of bfloat16 in the highest bit."""
    num_scales = groups.num_columns // groups.group
    if num_scales == 1:
        return numbers.view(torch.int32)
    sizes = [num_scales, groups.num_numbers - num_scales]
    scales, pairs = torch.split(_in_groups(numbers, groups.num_numbers), sizes, dim=-1)
    zeros = pairs.contiguous().view(torch.uint8).int()
    words: Tensor = scales.int() & 0xFFFF | (zeros & 0x7F) << 16 | (zeros & 0x80) << 24
    return words.flatten(-2)


def _in_groups(row: Tensor, size: int) -> Tensor:
    """Shapes: row [.., m * size] -> [.., m, size]."""
    return row.view(*row.shape[:-1], -1, size)


def _in_order(words: Tensor, bits: int) -> Tensor:
    """Return words whose codes of so many bits are in order. Few copies exist at a time."""
    words = words.clone()
    for low, high in _EXCHANGES[bits]:
        shift = (2**high - 2**low) * bits
        places = (place for place in range(32 // bits) if place >> low & 1 and not place >> high & 1)
        mask = sum((1 << bits) - 1 << place * bits for place in places)
        changed = (words >> shift).bitwise_xor_(words).bitwise_and_(mask)
        words.bitwise_xor_(changed).bitwise_xor_(changed.bitwise_left_shift_(shift))
    return words
