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
    "q4_k": _Groups(256, 10, 32, "q4_k"),
    "q6_k": _Groups(256, 9, 48, "q6_k", 16),
    "int4-g128": _Groups(128, 2, 16, "int4-zero", 128),
    "int4-g64": _Groups(128, 3, 16, "int4-zero", 64),
    "int4-g32": _Groups(128, 6, 16, "int4-zero"),
}
FORMATS: Final = tuple(_GROUPS)  # that have a way to the GPU


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
    values = _values_plane(words, groups.format, cols)
    scales = _scales_plane(_rows_of(numbers, num_parts, rows), groups, cols)
    return PlanarWeights(groups.format, values, scales, groups.group)


def _rows_of(lines: Tensor, num_parts: int, rows: int) -> Tensor:
    """Return the rows part by part, without filling: [n, bands, m * 16] -> [n, num_parts * rows, m]."""
    number = len(lines)
    banded = lines.view(number, lines.shape[1] // num_parts, num_parts, -1, BAND).permute(0, 2, 1, 4, 3)
    parts = banded.reshape(number, num_parts, lines.shape[1] // num_parts * BAND, -1)
    flat = parts[:, :, :rows].reshape(-1)  # so that the last axis has a step of 1, even if it has one element
    return flat.view(number, num_parts * rows, -1)


def _values_plane(words: Tensor, planar: PlanarFormat, cols: int) -> Tensor:
    """Return values as `PlanarWeights` has them. Shapes: words [n, rows, words of a row] int32."""
    match planar:
        case "int8":
            return words.view(torch.int8)[..., :cols].contiguous()
        case "fp8":  # a word has the third, first, fourth and second one
            third, first, fourth, second = _in_groups(words.view(torch.uint8), 4).unbind(-1)
            return torch.stack((first, second, third, fourth), dim=-1).flatten(-2)[..., :cols].contiguous()
        case "q6_k":  # four words of low bits, then two of high bits
            low, high = torch.split(_in_groups(words, 6), [4, 2], dim=-1)
            return torch.cat((_nibbles_in_order(low.flatten(-2)), _pairs_in_order(high.flatten(-2))), dim=-1)
        case _:
            return _nibbles_in_order(words)[..., : cols // 8].contiguous()


def _scales_plane(numbers: Tensor, groups: _Groups, cols: int) -> Tensor:
    """Return scales as `PlanarWeights` has them. Shapes: numbers [n, rows, numbers of a row] int16."""
    match groups.format:
        case "mxfp4":
            return numbers.view(torch.uint8)[..., : cols // GROUP].contiguous()
        case "fp8":
            return numbers.view(torch.float32)
        case "q4_k":
            return numbers.view(torch.int32)
        case "q6_k":  # a word begins with the only number of 16 bits
            first, small = torch.split(_in_groups(numbers, groups.num_numbers), [1, groups.num_numbers - 1], dim=-1)
            return torch.cat((first, torch.zeros_like(first), small), dim=-1).flatten(-2).view(torch.int32)
        case "int4-zero":
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


def _nibbles_in_order(words: Tensor) -> Tensor:
    """Return words of eight codes in order; packed, the low halves of bytes have the first four."""
    low, high = words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F
    halves = []
    for codes in (low, high):
        pairs = (codes | codes >> 4) & 0x00FF00FF
        halves.append((pairs | pairs >> 8) & 0xFFFF)
    return halves[0] | halves[1] << 16


def _pairs_in_order(words: Tensor) -> Tensor:
    """Return words of sixteen codes of two bits in order. Packed, byte j has codes j, 4 + j, 8 + j and 12 + j."""
    for shift, mask in ((6, 0x00CC00CC), (12, 0x0000F0F0)):  # exchanges two bits of a code's place
        changed = (words ^ words >> shift) & mask
        words = words ^ changed ^ changed << shift
    return words
