"""The tensors that quantized matrices were cut into: checked as their headers have them, read in parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from moeflow.checkpoint.checkpoint import TensorInfo
from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN
from moeflow.checkpoint.safetensors.folder import SafetensorsFolder
from moeflow.core.errors import CheckpointError
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

SCALES = ("float16", "bfloat16", "float32")  # types of numbers other than weights
_CHUNK_BYTES = 1 << 22  # of a tensor whose columns are wanted


class TensorParts:
    """The tensors of a folder."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        """Take a folder, which stays open."""
        self._folder = folder

    def ending_in(self, suffix: str) -> Iterator[str]:
        """Yield the tensors whose names end so, without that, in order."""
        return (name.removesuffix(suffix) for name in sorted(self._folder.tensors) if name.endswith(suffix))

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        return name in self._folder.tensors

    def stored_as(self, name: str) -> str:
        """Return the dtype of a tensor that there is."""
        return self._folder.tensors[name].stored_as

    def info(self, name: str, dtypes: Collection[str], num_dims: int | None = None) -> TensorInfo:
        """Return what the header says of a tensor.

        Raises: CheckpointError if there is none, or it is of another dtype or number of dimensions.
        """
        info = self._folder.tensors.get(name)
        if info is None:
            raise CheckpointError(
                "is missing, unlike the other parts of its matrix",
                file=self._folder.path,
                tensor=name,
                remedy=DOWNLOAD_AGAIN,
            )
        if info.stored_as not in dtypes:
            raise self.misfit(name, f"is stored in {info.stored_as}, where {' or '.join(dtypes)} is expected")
        if num_dims is not None and len(info.shape) != num_dims:
            raise self.misfit(name, f"has the shape {list(info.shape)}, where {num_dims} dimensions are expected")
        return info

    def check_shape(self, name: str, dtypes: Collection[str], *shape: int) -> TensorInfo:
        """Return the same of a tensor of this shape. Raises: CheckpointError if it is of another."""
        info = self.info(name, dtypes)
        if info.shape != shape:
            raise self.misfit(name, f"has the shape {list(info.shape)}, where {list(shape)} is expected")
        return info

    def misfit(self, name: str, problem: str) -> CheckpointError:
        """Make the error for a tensor that is not as config.json says."""
        remedy = "Check that config.json and its quantization_config belong to these weights, or download them again"
        return CheckpointError(problem, file=self._folder.tensors[name].file, tensor=name, remedy=remedy)

    def whole(self, name: str) -> Tensor:
        """Return a tensor. Raises: CheckpointError, as do the next two."""
        return self._folder.read(name)

    def rows(self, name: str, start: int, stop: int, num_dims: int | None = None) -> Tensor:
        """Return rows [start, stop), each of the last `num_dims` dimensions; None: of all but the first."""
        num_dims = len(self._folder.tensors[name].shape) - 1 if num_dims is None else num_dims
        return self._folder.read_slices(name, start, stop, num_dims)

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """Return [start, stop) of the second of two dimensions."""
        num_rows, num_cols = self._folder.tensors[name].shape
        if (start, stop) == (0, num_cols):
            return self.whole(name)
        step = max(_CHUNK_BYTES // max(self._folder.tensors[name].num_bytes // num_rows, 1), 1)
        chunks = [
            self.rows(name, first, min(first + step, num_rows))[:, start:stop] for first in range(0, num_rows, step)
        ]
        return torch.cat(chunks)
