"""MXFP4 as in gpt-oss: four-bit floats, 32 of them with one exponent.

    N_blocks   [.., rows, cols / 32, 16] uint8      a byte has two neighbours, the first in its low half
    N_scales   [.., rows, cols / 32] uint8          2^(it - 127)

A matrix has the name N. With one more dimension it is a stack of experts, `..experts.gate_up_proj` or
`..experts.down_proj`; here each gets the names that families know, `..experts.0.gate_proj.weight` and so on. A stack
has an expert's gate rows before its up rows, but for gpt-oss, where they take turns. Source: transformers'
`integrations/mxfp4.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeflow.checkpoint.checkpoint import TensorInfo
from moeflow.checkpoint.e2m1 import e2m1_values
from moeflow.checkpoint.file_errors import check_num_tensors
from moeflow.checkpoint.quantized.matrix import Found
from moeflow.checkpoint.quantized.parts import TensorParts
from moeflow.kernels.on_demand import torch
from moeflow.kernels.weight_format import BlockKind

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK: Final = 32
_NAN: Final = 255  # as an exponent
_BLOCKS, _SCALES = "_blocks", "_scales"


def find_matrices(parts: TensorParts, config: Mapping[str, Any]) -> Found:
    """Return the matrices. Raises: CheckpointError."""
    takes_turns = config.get("model_type") == "gpt_oss"
    found = Found({}, set())
    for name in parts.ending_in(_BLOCKS):
        info = parts.info(name + _BLOCKS, ["uint8"])
        if len(info.shape) not in (3, 4) or info.shape[-1] != _BLOCK // 2:
            raise parts.misfit(
                name + _BLOCKS, f"has the shape {list(info.shape)}, where blocks of 16 bytes are expected"
            )
        parts.check_shape(name + _SCALES, ["uint8"], *info.shape[:-1])
        check_num_tensors(len(found.matrices) + 2 * info.shape[0] * (len(info.shape) == 4), info.file)
        found.matrices.update(
            _experts(parts, name, info, takes_turns) if len(info.shape) == 4 else _one(parts, name, info)
        )
        found.used.update((name + _BLOCKS, name + _SCALES))
    return found


def _one(parts: TensorParts, name: str, info: TensorInfo) -> Iterator[tuple[str, MXFP4Matrix]]:
    own = name if name.endswith(".weight") else f"{name}.weight"
    yield own, _part(parts, name, info, 0, info.shape[0], 1)


def _experts(parts: TensorParts, name: str, info: TensorInfo, takes_turns: bool) -> Iterator[tuple[str, MXFP4Matrix]]:
    prefix, _, matrix = name.rpartition(".")
    num_experts, num_rows = info.shape[:2]
    for expert in range(num_experts):
        first, own = expert * num_rows, f"{prefix}.{expert}"
        if matrix == "down_proj":
            yield f"{own}.down_proj.weight", _part(parts, name, info, first, num_rows, 1)
        elif matrix == "gate_up_proj" and num_rows % 2 == 0:
            half = num_rows // 2
            step, second = (2, 1) if takes_turns else (1, half)
            yield f"{own}.gate_proj.weight", _part(parts, name, info, first, half, step)
            yield f"{own}.up_proj.weight", _part(parts, name, info, first + second, half, step)
        else:
            raise parts.misfit(name + _BLOCKS, "is a stack of experts that is neither gate_up_proj nor down_proj")


def _part(parts: TensorParts, name: str, info: TensorInfo, first: int, num_rows: int, step: int) -> MXFP4Matrix:
    num_blocks = info.shape[-2]
    return MXFP4Matrix(
        shape=(num_rows, num_blocks * _BLOCK),
        num_bytes=num_rows * num_blocks * (_BLOCK // 2 + 1),
        file=info.file,
        parts=parts,
        name=name,
        first=first,
        step=step,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4Matrix:
    """A `QuantizedMatrix` of rows `first`, `first + step`, .. of a tensor's, however they are stacked there."""

    shape: tuple[int, int]
    num_bytes: int
    file: Path
    parts: TensorParts
    name: str
    first: int
    step: int

    @property
    def kind(self) -> BlockKind:
        """The same blocks as GGUF's."""
        return "MXFP4"

    @property
    def described(self) -> str:
        """Not needed: there is a kind."""
        return self.kind

    def read_blocks(self, start: int, stop: int) -> Tensor:
        """Return rows as GGUF's blocks: an exponent, then bytes with value j in the low and j + 16 in the high half."""
        values, exponents = self._read(start, stop)
        joined = values[..., : _BLOCK // 2] | values[..., _BLOCK // 2 :] << 4
        return torch.cat([exponents[..., None], joined], dim=2).view(stop - start, -1)

    def read_values(self, start: int, stop: int) -> Tensor:
        """Return rows as floats."""
        values, exponents = self._read(start, stop)
        return torch.ldexp(e2m1_values(values), exponents[..., None].int() - 127).view(stop - start, -1)

    def _read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return codes [n, blocks, 32] and exponents [n, blocks], uint8."""
        first, last = self.first + start * self.step, self.first + (stop - 1) * self.step + 1
        pairs, exponents = (
            self.parts.rows(self.name + part, first, last, num_dims)[:: self.step]
            for part, num_dims in ((_BLOCKS, 2), (_SCALES, 1))
        )
        if (exponents == _NAN).any():
            raise self.parts.misfit(self.name + _SCALES, "holds a NaN")
        return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(2), exponents
