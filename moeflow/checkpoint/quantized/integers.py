"""Matrices of small integers with a scale and a zero point for neighbours of a row: (code - zero point) * scale.

AWQ, GPTQ and compressed-tensors differ in where they put these three; from here on they are the same. A block has one
scale and a flag, fp16 or bfloat16. If more values than a block share a scale, it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from moeflow.kernels.on_demand import torch
from moeflow.kernels.weight_format import GroupKind

if TYPE_CHECKING:
    from torch import Tensor

_KINDS: Final[dict[int, dict[int, GroupKind]]] = {  # by bits and values of a block, the largest first
    4: {128: "INT4_G128", 64: "INT4_G64", 32: "INT4_G32"},
    8: {128: "INT8_G128"},
}
_IS_BF16: Final = -(1 << 15)  # the mark beside a zero point (csrc/formats/group_source_types.h), the largest of 16 bits


class Integers(NamedTuple):
    """Some rows, scales each for as many neighbours as there are columns to one."""

    codes: Tensor  # [n, cols] uint8
    scales: Tensor  # [n, groups] float16, bfloat16 or float32
    zeros: Tensor  # [n, groups] int16


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerMatrix:
    """A `QuantizedMatrix` of integers."""

    shape: tuple[int, int]
    num_bytes: int
    file: Path
    bits: int
    group: int  # columns that share a scale
    scales_in: str  # a dtype
    read: Callable[[int, int], Integers]  # of rows [start, stop)

    @property
    def kind(self) -> GroupKind | None:
        """The largest blocks with one scale."""
        if self.scales_in == "float32":
            return None
        kinds = _KINDS[self.bits]
        return next((kinds[width] for width in kinds if self.group % width == 0), None)

    @property
    def described(self) -> str:
        """Bits, group and type of scales."""
        return f"int{self.bits} in groups of {self.group} with {self.scales_in} scales"

    def read_blocks(self, start: int, stop: int) -> Tensor:
        """Return rows as blocks: a scale, a zero point, codes; see `QuantizedMatrix`."""
        codes, scales, zeros = self.read(start, stop)
        width = next(width for width, kind in _KINDS[self.bits].items() if kind == self.kind)
        marked = zeros | _IS_BF16 if scales.dtype == torch.bfloat16 else zeros
        heads = torch.stack([scales.view(torch.int16), marked], dim=-1).repeat_interleave(self.group // width, dim=1)
        blocks = torch.cat([heads.view(torch.uint8), codes.view(codes.shape[0], -1, width)], dim=2)
        return blocks.view(codes.shape[0], -1)

    def read_values(self, start: int, stop: int) -> Tensor:
        """Return rows as floats."""
        codes, scales, zeros = self.read(start, stop)
        grouped = codes.view(*scales.shape, -1).float()
        return ((grouped - zeros[..., None]) * scales.float()[..., None]).view(codes.shape)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of four or eight bits in words, the lowest first.

    Shapes: words [.., W] int32 -> [.., W * 32 / bits] uint8.
    """
    numbers = words.contiguous().view(torch.uint8)  # little-endian, as safetensors are
    if bits == 8:
        return numbers
    return torch.stack([numbers & 15, numbers >> 4], dim=-1).view(*words.shape[:-1], -1)
