"""Weight matrices as GPU kernels read them: values in one plane, and scales of groups of columns in another.

Rows follow each other, so a program that computes some outputs reads whole lines of memory. Eight 4-bit codes lie in a
32-bit word, column 8 i + j in bits 4 j to 4 j + 3. A thread loads 16 bytes, the 32 values of one group.

    format     group  value                     scales
    int8       32     integer * scale           float16
    int4       32     (code - 8) * scale        float16
    int4-zero  any    (code - zero) * scale     a word: 16 bits of the scale, 15 of the zero point, 1 if it is bfloat16
    int8-zero  128    (byte - zero) * scale     likewise
    mxfp4      32     e2m1(code) * scale        an exponent of 8 bits, for half the scale and twice the e2m1 number
    fp8        128    e4m3(byte) * scale        float32
    q4_k       32     code * scale - minimum    5 words for 256 columns: d, dmin in float16, scales and minima of bytes
    q5_k       32     code * scale - minimum    likewise
    q6_k       16     (code - 32) * scale       5 words for 256 columns: d in float16, signed bytes of scales

A row of q6_k has the low four bits of all columns, then words with two high bits of 16 columns each. In q5_k they have
one high bit of 32 columns. Values equal those of the CPU formats (csrc/formats/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

GROUP: Final = 32  # columns that share a scale in most formats
SUPERBLOCK: Final = 256  # columns that share a head of `HEAD_WORDS` words in q4_k and q6_k
HEAD_WORDS: Final = 5
PlanarFormat: TypeAlias = Literal["int8", "int4", "int4-zero", "int8-zero", "mxfp4", "fp8", "q4_k", "q5_k", "q6_k"]
SUPERBLOCK_FORMATS: Final = ("q4_k", "q5_k", "q6_k")
MadeFormat: TypeAlias = Literal["int8", "int4"]  # that floats are rounded to


class PlanarWeights(msgspec.Struct, frozen=True):
    """A stack of matrices [N, K], K a multiple of `group`, and of 256 for q4_k, q5_k and q6_k."""

    format: PlanarFormat
    values: Tensor  # [slots, N, K] int8 or uint8, else [slots, N, K / 8] int32; q5_k: 5 K / 32, q6_k: 3 K / 16
    scales: Tensor  # [slots, N, scales or words of a row]
    group: int = GROUP

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns."""
        num_matrices, num_rows, row = self.scales.shape
        superblocks = row // HEAD_WORDS * SUPERBLOCK
        return num_matrices, num_rows, superblocks if self.format in SUPERBLOCK_FORMATS else row * self.group

    def __len__(self) -> int:
        """Return how many matrices there are."""
        return len(self.scales)

    def __getitem__(self, slot: int) -> Tensor:
        """Return the exact values of a matrix: [N, K] float32."""
        _, num_rows, num_columns = self.shape
        scales, offsets = self._numbers(self.scales[slot])
        values = self._integers(self.values[slot]).view(num_rows, -1, self.group).float()
        groups = values * scales.unsqueeze(-1)
        return (groups if offsets is None else groups + offsets.unsqueeze(-1)).view(num_rows, num_columns)

    def _integers(self, values: Tensor) -> Tensor:
        """Return values without scales: [N, K]."""
        match self.format:
            case "int8" | "int8-zero":
                return values
            case "fp8":
                return values.view(torch.float8_e4m3fn)
            case "q6_k":
                num_low = values.shape[1] * 2 // 3
                return (_codes(values[:, :num_low], 4) | _codes(values[:, num_low:], 2) << 4) - 32
            case "q5_k":
                num_low = values.shape[1] * 4 // 5
                return _codes(values[:, :num_low], 4) | _codes(values[:, num_low:], 1) << 4
            case "mxfp4":
                codes = _codes(values, 4)
                return small_floats((codes & 8) << 12 | (codes & 7) << 9) * 2.0**15
            case "int4":
                return _codes(values, 4) - 8
            case "int4-zero" | "q4_k":
                return _codes(values, 4)

    def _numbers(self, scales: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scales of groups, and offsets if there are: [N, K / group] float32."""
        match self.format:
            case "mxfp4":
                exponents = scales.int()
                bits = torch.where(exponents < 2, exponents + 1 << 21, exponents - 1 << 23)
                return bits.view(torch.float32), None
            case "int4-zero" | "int8-zero":
                found = torch.where(scales < 0, (scales << 16).view(torch.float32), small_floats(scales))
                return found, -found * (scales >> 16 & 0x7FFF)
            case "q4_k" | "q5_k" | "q6_k":
                words = scales.view(len(scales), -1, HEAD_WORDS)
                small = words[..., 1:].contiguous()
                if self.format == "q6_k":
                    return (small_floats(words[..., :1]) * small.view(torch.int8)).flatten(1), None
                scale, minimum = small.view(torch.uint8).view(*words.shape[:2], -1, 2).unbind(dim=-1)
                least = -small_floats(words[..., :1] >> 16) * minimum
                return (small_floats(words[..., :1]) * scale).flatten(1), least.flatten(1)
            case _:
                return scales.float(), None


def small_floats(bits: Tensor) -> Tensor:
    """Return float16 numbers, given as the low 16 bits of int32, in float32."""
    return bits.to(torch.int16).view(torch.float16).float()


def pack(weights: Tensor, weight_format: MadeFormat) -> PlanarWeights:
    """Round matrices to integers with a scale for each group. Shapes: weights [slots, N, K]; K divides by 32."""
    num_matrices, num_rows, num_columns = weights.shape
    groups = weights.float().reshape(num_matrices, num_rows, num_columns // GROUP, GROUP)
    integers, scales = _int8(groups) if weight_format == "int8" else _int4(groups)
    values = integers.reshape(num_matrices, num_rows, num_columns)
    values = values if weight_format == "int8" else words_of(values, 4)
    return PlanarWeights(weight_format, values, scales.squeeze(-1).half())


def widened(weights: PlanarWeights) -> PlanarWeights:
    """Return weights of "int4" in "int8", with the same values."""
    assert weights.format == "int4"
    return PlanarWeights("int8", _codes(weights.values, 4).sub_(8).to(torch.int8), weights.scales)


def _int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest step, halves away from zero, as GGUF's Q8_0 does."""
    scales = groups.abs().amax(dim=-1, keepdim=True) / 127
    scaled = groups * _inverse(scales)
    sizes = scaled.abs().clamp(max=127)
    whole = sizes.trunc()
    rounded = whole + (sizes - whole >= 0.5)
    return rounded.copysign(scaled).to(torch.int8), scales


def _int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Make -8 of the value with the largest magnitude, as GGUF's Q4_0 does."""
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    scales = largest / -8
    return (groups * _inverse(scales) + 8.5).clamp(0, 15).to(torch.uint8), scales


def _inverse(scales: Tensor) -> Tensor:
    return (1 / scales).masked_fill(scales == 0, 0.0)


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Join codes of so many bits to words, the first lowest. Shapes: [.., K] uint8 -> [.., K * bits / 32] int32."""
    parts = codes.view(*codes.shape[:-1], -1, 8 // bits)
    joined = parts[..., 0].clone()
    for place in range(1, 8 // bits):
        joined |= parts[..., place] << bits * place
    return joined.view(torch.int32)


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes in words. Shapes: [.., n] int32 -> [.., n * 32 / bits]."""
    codes = [words >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)]
    return torch.stack(codes, dim=-1).flatten(-2)
