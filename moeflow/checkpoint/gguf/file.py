"""A GGUF file, or several parts of one, seen as the Hugging Face checkpoint of the same model.

Names, config and the order of q and k rows are Hugging Face's. Quantized weights are widened to float32 when read, one
tensor at a time, or one expert of a stack. The tokenizer inside is not looked
at, but for the ids of special tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeflow.checkpoint.checkpoint import StoredRows, TensorInfo, TensorTable, commonest_dtype
from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN, check_num_tensors, known_tensor
from moeflow.checkpoint.gguf.architecture import Architecture
from moeflow.checkpoint.gguf.architectures import read_architecture
from moeflow.checkpoint.gguf.blocks import widen_blocks
from moeflow.checkpoint.gguf.config import translate_config, translate_sampling
from moeflow.checkpoint.gguf.cuts import Cut
from moeflow.checkpoint.gguf.grids import LEVEL_KINDS, level_blocks
from moeflow.checkpoint.gguf.header import GGUFHeader, GGUFTensor
from moeflow.checkpoint.gguf.names import cut_names, heads_in_pairs, huggingface_name, is_single_row, part_of
from moeflow.checkpoint.gguf.nvfp4 import factors_of, is_beside_nvfp4, nvfp4_blocks, nvfp4_values
from moeflow.checkpoint.gguf.parts import read_gguf_parts
from moeflow.checkpoint.gguf.recurrent import huggingface_shape, is_decay
from moeflow.checkpoint.gguf.rope import LONG_TABLES, ROPE_FACTORS
from moeflow.checkpoint.gguf.tensor_types import TensorType
from moeflow.checkpoint.gguf.token_ids import translate_token_ids, with_turn_ends
from moeflow.checkpoint.raw_file import RawFile
from moeflow.core.errors import CheckpointError
from moeflow.kernels.on_demand import torch
from moeflow.kernels.weight_format import GGUF_BLOCK_KINDS, BlockKind

_UNQUANTIZED = {
    TensorType.F32: "float32",
    TensorType.F16: "float16",
    TensorType.BF16: "bfloat16",
}
_BLOCKS: dict[TensorType, BlockKind] = {TensorType[kind]: kind for kind in GGUF_BLOCK_KINDS}


@dataclass(frozen=True, slots=True)
class _GGUFPiece:
    """Where a Hugging Face tensor lies: a whole GGUF tensor or one expert's slice of it."""

    shape: tuple[int, ...]
    quantization: TensorType
    file: Path
    start: int  # byte in the file
    num_bytes: int
    pair_heads: int = 0  # heads whose rows are stored in pairs; 0: none
    is_decay: bool = False  # of recurrent layers; Hugging Face stores the logarithm
    rows: NDArray[np.int64] | None = None  # from `start` on; None: all, one behind the other
    factor: tuple[Path, int] | None = None  # of NVFP4: the place of the float factor of its scales; None: 1


class GGUFFile:
    """A `Checkpoint` in a GGUF file, or in several parts of one."""

    def __init__(self, path: Path) -> None:
        """Read and translate the header of a file, or the headers of all its parts if the first part is named.

        Raises: CheckpointError, naming file, tensor and remedy, if the file is damaged, its architecture is
        unsupported, or a tensor is unknown or has an unsupported type.
        """
        self.path = path
        self.config_file = path
        header = read_gguf_parts(path)
        architecture = read_architecture(header, path)
        self._files = {file: RawFile(file) for file in {path, *(it.file for it in header.tensors.values())}}
        self.config: Mapping[str, Any] = translate_config(
            header, architecture, lambda name: self._read_table(header, name), path
        )
        token_ids = translate_token_ids(header.metadata, path)
        self.generation_config: Mapping[str, Any] = {
            **with_turn_ends(token_ids, header.metadata),
            **translate_sampling(header.metadata),
        }
        tables = {ROPE_FACTORS, *(LONG_TABLES.values() if architecture.may_be_long else ())}
        self._pieces: dict[str, _GGUFPiece] = {}
        for tensor in header.tensors.values():
            check_num_tensors(len(self._pieces) + tensor.shape[0] * ("_exps" in tensor.name), tensor.file)
            if tensor.name not in tables and not is_beside_nvfp4(tensor.name, header.tensors):
                pieces = _pieces_of(tensor, architecture, self.config)
                if tensor.quantization == TensorType.NVFP4:
                    pieces = _with_factors(pieces, factors_of(tensor, header.tensors))
                self._pieces |= pieces
        if not self._pieces:
            raise CheckpointError("holds no weights", file=path, remedy=DOWNLOAD_AGAIN)
        self.tensors = TensorTable(
            {
                name: TensorInfo(piece.shape, piece.num_bytes, _stored_as(piece.quantization), piece.file)
                for name, piece in self._pieces.items()
            }
        )
        self.dtype: str = commonest_dtype(self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, quantized ones as float32; raises as `Checkpoint.read` does."""
        return self._read_piece(name, known_tensor(self._pieces, name, self.path))

    def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows of a matrix: as blocks if they are or become a `BlockKind`, else as floats.

        Raises: as `Checkpoint.read` does.
        """
        piece = known_tensor(self._pieces, name, self.path)
        num_rows, num_cols = piece.shape
        row_bytes = piece.num_bytes // max(num_rows, 1)
        data = self._read_bytes(name, piece, start, stop)
        numbers = _numbers_of_rows(piece, start, stop)
        kind = _BLOCKS.get(piece.quantization)
        if kind is not None:
            return StoredRows(data.view(stop - start, row_bytes), numbers, kind)
        if piece.quantization in LEVEL_KINDS:
            blocks = level_blocks(data, piece.quantization).view(stop - start, -1)
            return StoredRows(blocks, numbers, LEVEL_KINDS[piece.quantization])
        if piece.quantization == TensorType.NVFP4:
            blocks = nvfp4_blocks(data, self._read_factor(name, piece)).view(stop - start, -1)
            return StoredRows(blocks, numbers, "NVFP4")
        return StoredRows(_widen(data, piece.quantization, (stop - start, num_cols)), numbers)

    def close(self) -> None:
        """Release the files."""
        for file in self._files.values():
            file.close()

    def _read_table(self, header: GGUFHeader, name: str) -> list[float]:
        table = known_tensor(header.tensors, name, self.path)
        factors: list[float] = self._read_piece(name, _whole(table)).tolist()
        return factors

    def _read_piece(self, name: str, piece: _GGUFPiece) -> torch.Tensor:
        data = self._read_bytes(name, piece, 0, piece.shape[0])
        if piece.quantization == TensorType.NVFP4:
            weights = nvfp4_values(data, self._read_factor(name, piece)).reshape(piece.shape)
        else:
            weights = _widen(data, piece.quantization, piece.shape)
        if piece.is_decay:
            return torch.log(-weights.float())
        return _pairs_to_halves(weights, piece.pair_heads) if piece.pair_heads else weights

    def _read_bytes(self, name: str, piece: _GGUFPiece, start: int, stop: int) -> torch.Tensor:
        """Return some rows as they lie in the file."""
        file = self._files[piece.file]
        row_bytes = piece.num_bytes // max(piece.shape[0], 1)
        if piece.rows is None:
            return file.read(piece.start + start * row_bytes, (stop - start) * row_bytes, name)
        runs = [(piece.start + first * row_bytes, count * row_bytes) for first, count in _runs(piece.rows[start:stop])]
        return torch.cat([file.read(place, size, name) for place, size in runs])

    def _read_factor(self, name: str, piece: _GGUFPiece) -> torch.Tensor:
        """Return what the scales of an NVFP4 matrix are multiplied by, [1] float32."""
        if piece.factor is None:
            return torch.ones(1)
        file, start = piece.factor
        factor = self._files[file].read(start, 4, name).view(torch.float32)
        if not (factor.isfinite() & (factor > 0)).item():
            problem = f"its scales are multiplied by {factor.item()}, where a number above zero is expected"
            raise CheckpointError(problem, file=file, tensor=name, remedy=DOWNLOAD_AGAIN)
        return factor


def _whole(tensor: GGUFTensor) -> _GGUFPiece:
    return _GGUFPiece(tensor.shape, tensor.quantization, tensor.file, tensor.start, tensor.num_bytes)


def _pieces_of(tensor: GGUFTensor, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, _GGUFPiece]:
    """Return what a GGUF tensor holds under Hugging Face names: itself, or a stack's experts."""
    names = architecture.moe_names
    cut = architecture.cuts.get(part_of(tensor.name))
    if cut is not None:
        return _cut(tensor, cut, config)
    name = huggingface_name(tensor.name, names, architecture.layer_names)
    if name is None:
        raise _misfit(f"is no part of a {architecture.model_type} model as it is known here", tensor)
    if is_single_row(tensor.name, names) and len(tensor.shape) == 1:
        return {name: replace(_whole(tensor), shape=(1, *tensor.shape))}
    if names is None or "{}" not in name:
        whole = replace(_whole(tensor), shape=huggingface_shape(tensor.name, tensor.shape))
        pair_heads = _pair_heads(tensor, architecture, config)
        return {name: replace(whole, pair_heads=pair_heads, is_decay=is_decay(tensor.name))}
    num_experts = config[names.count]
    if len(tensor.shape) < 2 or tensor.shape[0] != num_experts:
        raise _misfit(f"has the shape {list(tensor.shape)}, where {num_experts} experts are expected", tensor)
    return dict(_experts(tensor, name, num_experts))


def _experts(tensor: GGUFTensor, name: str, num_experts: int) -> Iterator[tuple[str, _GGUFPiece]]:
    """Yield the matrices of a stack; of an expert's, where `name` has several, they lie one below the other."""
    names, num_bytes = name.split("+"), tensor.num_bytes // num_experts
    rows, rest = divmod(tensor.shape[1], len(names))
    if rest:
        raise _misfit(f"has {tensor.shape[1]} rows for each expert, not those of {len(names)} matrices", tensor)
    for number in range(num_experts * len(names)):
        expert, matrix = divmod(number, len(names))
        size = num_bytes // len(names)
        shape, start = (rows, *tensor.shape[2:]), tensor.start + number * size
        yield names[matrix].format(expert), _GGUFPiece(shape, tensor.quantization, tensor.file, start, size)


def _with_factors(pieces: dict[str, _GGUFPiece], factors: GGUFTensor | None) -> dict[str, _GGUFPiece]:
    """Return pieces of an NVFP4 tensor with what multiplies their scales: a number for all, or for each expert."""
    if factors is None:
        return pieces
    count = factors.shape[0] if len(factors.shape) == 1 else 0
    if factors.quantization != TensorType.F32 or count == 0 or len(pieces) % count:
        raise _misfit(f"has the shape {list(factors.shape)}, where one float32 a matrix is expected", factors)
    return {
        name: replace(piece, factor=(factors.file, factors.start + number * count // len(pieces) * 4))
        for number, (name, piece) in enumerate(pieces.items())
    }


def _cut(tensor: GGUFTensor, cut: Cut, config: Mapping[str, Any]) -> dict[str, _GGUFPiece]:
    """Return the tensors of Hugging Face whose rows a GGUF tensor has."""
    num_rows = tensor.shape[0]
    try:
        rows_of = cut(config, num_rows)
    except ValueError as error:
        raise _misfit(str(error), tensor) from None
    row_bytes = tensor.num_bytes // max(num_rows, 1)
    pieces = {}
    for name, rows in zip(cut_names(tensor.name, list(rows_of)), rows_of.values(), strict=True):
        piece = replace(_whole(tensor), shape=(len(rows), *tensor.shape[1:]), num_bytes=len(rows) * row_bytes)
        if isinstance(rows, range):
            pieces[name] = replace(piece, start=tensor.start + rows.start * row_bytes)
        else:
            pieces[name] = replace(piece, rows=rows)
    return pieces


def _pair_heads(tensor: GGUFTensor, architecture: Architecture, config: Mapping[str, Any]) -> int:
    if not architecture.stores_pairs:
        return 0
    heads = heads_in_pairs(tensor.name, config["num_attention_heads"], config["num_key_value_heads"])
    if heads and tensor.shape[0] % (2 * heads):
        raise _misfit(f"has {tensor.shape[0]} rows, which are no pairs for {heads} heads", tensor)
    return heads


def _runs(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return rows as runs of neighbours, first and count each, in their order."""
    ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    starts = [0, *ends[:-1]]
    return [(int(rows[start]), end - start) for start, end in zip(starts, ends, strict=True)]


def _misfit(problem: str, tensor: GGUFTensor) -> CheckpointError:
    return CheckpointError(problem, file=tensor.file, tensor=tensor.name, remedy="Convert or download the model again")


def _widen(data: torch.Tensor, quantization: TensorType, shape: tuple[int, ...]) -> torch.Tensor:
    """Return what some bytes mean: in their own dtype, quantized ones as float32."""
    dtype = _UNQUANTIZED.get(quantization)
    if dtype is not None:
        return data.view(getattr(torch, dtype)).reshape(shape)
    return widen_blocks(data, quantization).reshape(shape)


def _pairs_to_halves(weights: Any, num_heads: int) -> Any:
    """Reorder the rows of q or k from pairs (2i, 2i+1) to halves (i, i + D/2), head by head."""
    pairs = weights.reshape(num_heads, -1, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _stored_as(quantization: TensorType) -> str:
    """Return a dtype, the kind of blocks for rows, or the name of a widened type."""
    return _UNQUANTIZED.get(quantization) or LEVEL_KINDS.get(quantization) or quantization.name


def _numbers_of_rows(piece: _GGUFPiece, start: int, stop: int) -> NDArray[np.int64]:
    """Return which rows of Hugging Face's matrix the rows [start, stop) of the file are."""
    if not piece.pair_heads:
        return np.arange(start, stop)
    numbers: NDArray[np.int64] = _pairs_to_halves(np.arange(piece.shape[0]), piece.pair_heads).argsort()[start:stop]
    return numbers
