"""NVFP4: four-bit floats (e2m1), 16 of them with a float8 scale, and a float32 number for a whole matrix.

For a linear layer `X` of `in` inputs and `out` outputs, an expert's being layers like others:

    X.weight or X.weight_packed      [out, in / 2] uint8     a byte has two neighbours, the first in its low half
    X.weight_scale                   [out, in / 16] float8 (e4m3)
    X.weight_scale_2                 [] or [1] float32      in ModelOpt's folders: a scale is `weight_scale` times it,
    X.weight_global_scale            likewise               in compressed-tensors': by it

Scales are rounded to float32, weights as well: (number) * (scale). So it is in both packages. What activations were to
be rounded to (`input_scale`, `input_global_scale`) is not followed: here they stay finer. Source: the packages
nvidia-modelopt and compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from moeflow.checkpoint.e2m1 import e2m1_values
from moeflow.checkpoint.quantized.matrix import Found
from moeflow.checkpoint.quantized.parts import TensorParts
from moeflow.kernels.on_demand import torch
from moeflow.kernels.weight_format import GroupKind

if TYPE_CHECKING:
    from torch import Tensor

_GROUP: Final = 16  # numbers that share a scale
_BLOCK: Final = 32  # that kernels take at once
_LARGEST: Final = 126  # of a scale's bits: larger ones are NaN or negative


class Layout(NamedTuple):
    """What parts of a matrix are called below its layer."""

    numbers: str
    of_all: str
    divides: bool  # the scales, instead of multiplying them


MODELOPT: Final = Layout("weight", "weight_scale_2", divides=False)
COMPRESSED_TENSORS: Final = Layout("weight_packed", "weight_global_scale", divides=True)


def find_matrices(parts: TensorParts, layout: Layout) -> Found:
    """Return the layers whose numbers are stored so. Raises: CheckpointError."""
    found = Found({}, set())
    for name in parts.ending_in(f".{layout.numbers}"):
        if parts.stored_as(f"{name}.{layout.numbers}") == "uint8":
            found.matrices[f"{name}.weight"] = _matrix(parts, name, layout)
            found.used.update(f"{name}.{part}" for part in (layout.numbers, "weight_scale", layout.of_all))
    return found


def _matrix(parts: TensorParts, name: str, layout: Layout) -> NVFP4Matrix:
    numbers, of_all = f"{name}.{layout.numbers}", f"{name}.{layout.of_all}"
    info = parts.info(numbers, ["uint8"], 2)
    num_rows, num_cols = info.shape[0], 2 * info.shape[1]
    if num_cols % _GROUP:
        raise parts.misfit(numbers, f"has rows of {num_cols} numbers, which are no groups of {_GROUP}")
    scale_info = parts.check_shape(f"{name}.weight_scale", ["float8_e4m3fn"], num_rows, num_cols // _GROUP)
    of_all_info = parts.info(of_all, ["float32"])
    if of_all_info.shape not in ((), (1,)):
        raise parts.misfit(of_all, f"has the shape {list(of_all_info.shape)}, where one number is expected")
    return NVFP4Matrix(
        shape=(num_rows, num_cols),
        num_bytes=info.num_bytes + scale_info.num_bytes + of_all_info.num_bytes,
        file=info.file,
        parts=parts,
        numbers=numbers,
        scales=f"{name}.weight_scale",
        of_all=of_all,
        divides=layout.divides,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NVFP4Matrix:
    """A `QuantizedMatrix` of NVFP4."""

    shape: tuple[int, int]
    num_bytes: int
    file: Path
    parts: TensorParts
    numbers: str
    scales: str
    of_all: str
    divides: bool

    @property
    def kind(self) -> GroupKind | None:
        """Blocks, if rows are whole ones."""
        return None if self.shape[1] % _BLOCK else "NVFP4"

    @property
    def described(self) -> str:
        """What rows are that end within a block."""
        return f"NVFP4 in rows of {self.shape[1]}"

    def read_blocks(self, start: int, stop: int) -> Tensor:
        """Return rows as a number for all, two scales and 16 bytes at a time; with a minus if it divides."""
        of_all = -self._of_all() if self.divides else self._of_all()
        num_blocks = self.shape[1] // _BLOCK
        parts = (
            of_all.view(torch.uint8).expand(stop - start, num_blocks, -1),
            self._scales(start, stop),
            self._pairs(start, stop),
        )
        return torch.cat([it.reshape(stop - start, num_blocks, -1) for it in parts], dim=2).view(stop - start, -1)

    def read_values(self, start: int, stop: int) -> Tensor:
        """Return rows as floats."""
        pairs, scales = self._pairs(start, stop), self._scales(start, stop).view(torch.float8_e4m3fn).float()
        scales = scales / self._of_all() if self.divides else scales * self._of_all()
        values = e2m1_values(torch.stack([pairs & 15, pairs >> 4], dim=-1))
        return (values.view(*scales.shape, _GROUP) * scales[..., None]).view(stop - start, -1)

    def _pairs(self, start: int, stop: int) -> Tensor:
        """Return [n, cols / 2] uint8."""
        return self.parts.rows(self.numbers, start, stop)

    def _scales(self, start: int, stop: int) -> Tensor:
        """Return their bits, [n, groups] uint8."""
        scales = self.parts.rows(self.scales, start, stop).view(torch.uint8)
        if (scales > _LARGEST).any():
            raise self.parts.misfit(self.scales, f"holds a NaN or a negative number in rows {start} to {stop}")
        return scales

    def _of_all(self) -> Tensor:
        """Return what all scales are multiplied or divided by, [1] float32."""
        of_all = self.parts.whole(self.of_all).view(1)
        if not (of_all.isfinite() & (of_all > 0)).item():
            raise self.parts.misfit(self.of_all, f"is {of_all.item()}, where a number above zero is expected")
        return of_all
