"""Weight matrices as GPU kernels read them: values in one plane, scales of groups of 32 columns in another.

Rows follow each other, so a program that computes some outputs reads whole lines of memory. Eight int4 values lie in a
32-bit word, column 8 i + j in bits 4 j to 4 j + 3. A thread loads 16 bytes, the 32 values of one group.
The integers and scales equal the CPU formats "int8" and "int4" (csrc/formats/formats.h).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

GROUP: Final = 32  # columns that share a scale
INT4_IN_WORD: Final = 8
PlanarFormat: TypeAlias = Literal["int8", "int4"]


class PlanarWeights(msgspec.Struct, frozen=True):
    """A stack of matrices [N, K], K a multiple of 32.

    A value is `integer * scale`, and for int4 `(code - 8) * scale`.
    """

    values: Tensor  # [slots, N, K] int8, or [slots, N, K / 8] int32 with eight int4 codes each
    scales: Tensor  # [slots, N, K / 32] float16

    @property
    def format(self) -> PlanarFormat:
        """The format of the values."""
        return "int8" if self.values.dtype == torch.int8 else "int4"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns."""
        return len(self.scales), self.scales.shape[1], self.scales.shape[2] * GROUP

    def __len__(self) -> int:
        """Return how many matrices there are."""
        return len(self.scales)

    def __getitem__(self, slot: int) -> Tensor:
        """Return the exact values of a matrix: [N, K] float32."""
        values, scales = self.values[slot], self.scales[slot].float().unsqueeze(-1)
        if self.format == "int4":
            shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
            values = ((values.unsqueeze(-1) >> shifts) & 15) - 8
        return (values.reshape(*scales.shape[:2], GROUP).float() * scales).flatten(1)


def pack(weights: Tensor, weight_format: PlanarFormat) -> PlanarWeights:
    """Round matrices to integers with a scale for each group. Shapes: weights [slots, N, K]; K divides by 32."""
    num_matrices, num_rows, num_columns = weights.shape
    groups = weights.float().reshape(num_matrices, num_rows, num_columns // GROUP, GROUP)
    integers, scales = _int8(groups) if weight_format == "int8" else _int4(groups)
    values = integers.reshape(num_matrices, num_rows, num_columns)
    return PlanarWeights(values if weight_format == "int8" else _words(values), scales.squeeze(-1).half())


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
    return (groups * _inverse(scales) + 8.5).clamp(0, 15).to(torch.int32), scales


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


def _words(codes: Tensor) -> Tensor:
    """Join eight codes to a word. Shapes: [.., K] int32 -> [.., K / 8]."""
    eights = codes.view(*codes.shape[:-1], -1, INT4_IN_WORD)
    words: Tensor = eights[..., 0].clone()
    for place in range(1, INT4_IN_WORD):
        words |= eights[..., place] << 4 * place
    return words
