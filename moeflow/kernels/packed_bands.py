"""From the CPU kernels' layout of experts to that of the GPU kernels, by torch on any device.

A band of 16 rows has first its scales, then lines of 16 words, one a row (csrc/formats/formats.h). So all four formats
here need the same exchange of two axes, of words. No value changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import matrix_bytes, whole_bands
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.planar_rows import made_format
from moeflow.kernels.triton.planar_weights import GROUP, PlanarWeights, pack
from moeflow.kernels.weight_format import BAND, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

PlainMatrices: TypeAlias = "Tensor | PlanarWeights"  # [n, rows, cols], as GPU kernels read them
# Bits of a value in formats that a device can bring into its own layout, and whether groups have scales.
_BITS: Final[dict[str, int]] = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
_INTEGERS: Final = ("int8", "int4")
FORMATS: Final = tuple(_BITS)


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
    """Return room for so many matrices of the same kind. Raises: RuntimeError from torch."""
    if isinstance(matrices, PlanarWeights):
        values, scales = (_room(each, count) for each in (matrices.values, matrices.scales))
        return PlanarWeights(matrices.format, values, scales, matrices.group)
    return _room(matrices, count)


def _room(like: Tensor, count: int) -> Tensor:
    return torch.empty((count, *like.shape[1:]), dtype=like.dtype, device=like.device)


def store(matrices: PlainMatrices, slots: PlainMatrices, first: int) -> None:
    """Write matrices to consecutive slots, in the slots' format."""
    if isinstance(slots, PlanarWeights):
        if not isinstance(matrices, PlanarWeights) or matrices.format != slots.format:
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
    bits, groups = _BITS[weight_format], -(-cols // GROUP)
    num_bands = num_parts * whole_bands(rows) // BAND
    bands = packed.reshape(len(packed), num_bands, -1)
    num_words = groups * GROUP * bits // 32  # of a row
    first_word = bands.shape[2] - 4 * BAND * num_words
    lines = bands[..., first_word:].reshape(len(packed), num_bands, -1).view(torch.int32)
    words = lines.view(len(packed), num_bands, num_words, BAND).transpose(2, 3).contiguous()
    words = _without_bands(words, num_parts, rows)
    if weight_format not in _INTEGERS:
        return words.view(torch.float32 if bits == 32 else torch.bfloat16)[..., :cols].contiguous()
    assert cols % GROUP == 0, "refused before"
    scales = bands[..., : 2 * BAND * groups].reshape(len(packed), num_bands, -1).view(torch.float16)
    scales = scales.view(len(packed), num_bands, groups, BAND).transpose(2, 3).contiguous()
    values = words.view(torch.int8) if bits == 8 else _nibbles_in_order(words)
    return PlanarWeights(made_format(weight_format), values, _without_bands(scales, num_parts, rows))


def _without_bands(banded: Tensor, num_parts: int, rows: int) -> Tensor:
    """Return the rows of each part together, without filling: [n, bands, 16, m] -> [n, num_parts * rows, m]."""
    number, _, _, size = banded.shape
    parts = banded.view(number, -1, num_parts, BAND, size).transpose(1, 2).reshape(number, num_parts, -1, size)
    return parts[:, :, :rows].reshape(number, num_parts * rows, size)


def _nibbles_in_order(words: Tensor) -> Tensor:
    """Return words of eight codes in order; packed, the low halves of bytes have the first four."""
    low, high = words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F
    halves = []
    for codes in (low, high):
        pairs = (codes | codes >> 4) & 0x00FF00FF
        halves.append((pairs | pairs >> 8) & 0xFFFF)
    return halves[0] | halves[1] << 16
