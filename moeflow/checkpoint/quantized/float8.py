"""Matrices of 8-bit floats (e4m3) with scales: for blocks of weights, as in DeepSeek's and Qwen's folders, or others.

For a linear layer `X`: `X.weight` [out, in] float8, and `X.weight_scale_inv` or `X.weight_scale`, of which a weight is
the product: [out / block rows, in / block columns] rounded up, [out, 1], [out], [1] or []. What activations were to be
rounded to (`activation_scheme`, `input_scale`) is not followed: here they stay finer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeflow.checkpoint.quantized.matrix import Found
from moeflow.checkpoint.quantized.parts import SCALES, TensorParts
from moeflow.checkpoint.quantized.settings import QuantizationSettings
from moeflow.core.truncated_repr import truncated_repr
from moeflow.kernels.on_demand import torch
from moeflow.kernels.weight_format import GroupKind

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS: Final = 128  # of a block
_NAN: Final = 0x7F  # without its sign


def find_fp8(parts: TensorParts, settings: QuantizationSettings) -> Found:
    """Return the linear layers of a folder in `fp8`. Raises: CheckpointError."""
    settings.one_of("fmt", ["e4m3"], "e4m3")
    block = settings.values.get("weight_block_size")
    return find_matrices(parts, settings, "_scale" if block is None else "_scale_inv", block)


def find_matrices(parts: TensorParts, settings: QuantizationSettings, suffix: str, block: Any) -> Found:
    """Return all matrices that have scales under their name with `suffix`; `block` is rows and columns of blocks.

    Raises: CheckpointError.
    """
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(it) is int and it > 0 for it in block)
    ):
        raise settings.refuse(f"where blocks of {truncated_repr(block)} are no rows and columns")
    found = Found({}, set())
    for name in parts.ending_in(f".weight{suffix}"):
        weight = f"{name}.weight"
        found.matrices[weight] = _matrix(parts, weight, suffix, None if block is None else (block[0], block[1]))
        found.used.update((weight, weight + suffix, f"{name}.input_scale"))
    return found


def _matrix(parts: TensorParts, weight: str, suffix: str, block: tuple[int, int] | None) -> Float8Matrix:
    info = parts.info(weight, ["float8_e4m3fn"], 2)
    num_rows, num_cols = info.shape
    scale_info = parts.info(weight + suffix, [*SCALES, "float8_e8m0fnu"])
    shape = scale_info.shape
    if block is not None and shape == (-(-num_rows // block[0]), -(-num_cols // block[1])):
        rows, cols = block
    elif block is None and shape in ((num_rows, 1), (num_rows,)):
        rows, cols = 1, num_cols
    elif block is None and shape in ((), (1,)):
        rows, cols = num_rows, num_cols
    else:
        expected = f"blocks of {list(block)}" if block else "a scale for all or for each row"
        raise parts.misfit(
            weight + suffix, f"has the shape {list(shape)}: weights of {list(info.shape)} have {expected}"
        )
    return Float8Matrix(
        shape=(num_rows, num_cols),
        num_bytes=info.num_bytes + scale_info.num_bytes,
        file=info.file,
        parts=parts,
        name=weight,
        scale_name=weight + suffix,
        block=(rows, cols),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Matrix:
    """A `QuantizedMatrix` of float8."""

    shape: tuple[int, int]
    num_bytes: int
    file: Path
    parts: TensorParts
    name: str
    scale_name: str
    block: tuple[int, int]  # rows and columns that share a scale

    @property
    def kind(self) -> GroupKind | None:
        """Blocks of 128, if scales change nowhere within one."""
        columns, wide = self.shape[1], self.block[1]
        return None if columns % _COLUMNS or (wide % _COLUMNS and wide < columns) else "F8_E4M3"

    @property
    def described(self) -> str:
        """How many share a scale."""
        return f"float8 in blocks of {self.block[0]} x {self.block[1]}"

    def read_blocks(self, start: int, stop: int) -> Tensor:
        """Return rows as 128 values at a time, a float32 scale before them; see `QuantizedMatrix`."""
        values, num_blocks = self._read(start, stop), self.shape[1] // _COLUMNS
        scales = self._scales(start, stop, _COLUMNS, num_blocks).view(torch.uint8)
        blocks = [it.view(stop - start, num_blocks, -1) for it in (scales, values.view(torch.uint8))]
        return torch.cat(blocks, dim=2).view(stop - start, -1)

    def read_values(self, start: int, stop: int) -> Tensor:
        """Return rows as floats."""
        return self._read(start, stop).float() * self._scales(start, stop, 1, self.shape[1])

    def _read(self, start: int, stop: int) -> Tensor:
        values = self.parts.rows(self.name, start, stop)
        if ((values.view(torch.uint8) & _NAN) == _NAN).any():
            raise self.parts.misfit(self.name, f"holds a NaN in rows {start} to {stop}")
        return values

    def _scales(self, start: int, stop: int, width: int, count: int) -> Tensor:
        """Return the scales of every `width` columns, [n, count] float32, contiguous."""
        rows, cols = self.block
        first = start // rows
        num_cols = -(-self.shape[1] // cols)
        scales = self.parts.whole(self.scale_name).float().view(-1, num_cols)[first : -(-stop // rows)]
        of_rows = scales[torch.arange(start, stop) // rows - first]
        return of_rows[:, torch.arange(count) * width // cols].contiguous()
