"""A Hugging Face folder with quantized weights, seen as the checkpoint of the model that it stands for.

Names, shapes and config are those of the unquantized model. A matrix is assembled row by row: bit-exact in blocks that
kernels read, or as floats if no kind of block can hold it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moeflow.checkpoint.checkpoint import StoredRows, TensorInfo, TensorTable, commonest_dtype
from moeflow.checkpoint.quantized import auto_round, awq, compressed_tensors, float8, gptq, modelopt, mxfp4
from moeflow.checkpoint.quantized.matrix import Found, QuantizedMatrix
from moeflow.checkpoint.quantized.parts import SCALES, TensorParts
from moeflow.checkpoint.quantized.settings import REMEDY, QuantizationSettings
from moeflow.checkpoint.safetensors.folder import QUANTIZATION_KEYS, SafetensorsFolder
from moeflow.core.errors import CheckpointError
from moeflow.core.extensions import ExtensibleTable

if TYPE_CHECKING:
    import torch

# Settings for rounding activations and KV caches, which are not rounded here.
_NOT_OF_WEIGHTS = re.compile(r"\.(input|output|k|v|q|kv)_(scale|global_scale|zero_point)$")

# By what quantization_config calls the method: what finds the matrices that tensors were made of.
FORMATS: Final = ExtensibleTable[Callable[[TensorParts, QuantizationSettings, Mapping[str, Any]], Found]](
    "moeflow.formats",
    {
        "mxfp4": lambda parts, _, config: mxfp4.find_matrices(parts, config),
        "fp8": lambda parts, settings, _: float8.find_fp8(parts, settings),
        "fbgemm_fp8": lambda parts, settings, _: float8.find_fp8(parts, settings),
        "compressed-tensors": lambda parts, settings, _: compressed_tensors.find_matrices(parts, settings),
        "awq": lambda parts, settings, _: awq.find_matrices(parts, settings),
        "gptq": lambda parts, settings, _: gptq.find_matrices(parts, settings),
        "auto-round": lambda parts, settings, _: auto_round.find_matrices(parts, settings),
        "modelopt": lambda parts, settings, _: modelopt.find_matrices(parts, settings),
    },
)


class QuantizedFolder:
    """A `Checkpoint` in a folder whose config names a quantization."""

    def __init__(self, folder: SafetensorsFolder, settings: QuantizationSettings) -> None:
        """Take the folder, which is closed with this, and how its weights are quantized.

        Raises: CheckpointError if the quantization is not supported, or tensors are not as it has them.
        """
        self._folder = folder
        self.path: Path = folder.path
        self.config_file: Path = folder.config_file
        self.config: Mapping[str, Any] = {key: it for key, it in folder.config.items() if key not in QUANTIZATION_KEYS}
        self.generation_config: Mapping[str, Any] = folder.generation_config
        found = _find(TensorParts(folder), settings, self.config)
        self._matrices: dict[str, QuantizedMatrix] = found.matrices
        self.tensors = TensorTable(_described(found) | _others(folder, found))
        self.dtype: str = commonest_dtype(self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, quantized ones as float32; raises as `Checkpoint.read` does."""
        matrix = self._matrices.get(name)
        return self._folder.read(name) if matrix is None else matrix.read_values(0, matrix.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows of a matrix, as blocks where possible. Raises: as `Checkpoint.read`."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._folder.read_rows(name, start, stop)
        read = matrix.read_values if matrix.kind is None else matrix.read_blocks
        return StoredRows(read(start, stop), np.arange(start, stop), matrix.kind)

    def close(self) -> None:
        """Release the files."""
        self._folder.close()


def _find(parts: TensorParts, settings: QuantizationSettings, config: Mapping[str, Any]) -> Found:
    if settings.method not in FORMATS:
        raise settings.refuse("which is not supported")
    found = FORMATS[settings.method](parts, settings, config)
    if not found.matrices:
        raise settings.refuse("but no tensor is stored so")
    return found


def _described(found: Found) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(matrix.shape, matrix.num_bytes, matrix.kind or matrix.described, matrix.file)
        for name, matrix in found.matrices.items()
    }


def _others(folder: SafetensorsFolder, found: Found) -> dict[str, TensorInfo]:
    """Return the tensors that are no parts of quantized matrices, which have to be floats."""
    others = {
        name: info
        for name, info in folder.tensors.items()
        if name not in found.used and not _NOT_OF_WEIGHTS.search(name)
    }
    for name, info in others.items():
        if info.stored_as not in SCALES:
            raise CheckpointError(
                f"is stored in {info.stored_as}, and is no part of a matrix that is quantized as config.json says",
                file=info.file,
                tensor=name,
                remedy=REMEDY,
            )
    return others
