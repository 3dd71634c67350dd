"""What every reader offers, whatever the file format: Hugging Face names, shapes and settings.

Opening reads headers only. A model's loader asks `tensors` for what there is and `read` for one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.sha256 import sha256
from moeflow.kernels.weight_format import BlockKind

if TYPE_CHECKING:
    from _hashlib import HASH

    import torch


FLOATS: Final = ("float32", "float16", "bfloat16")  # types that are not widened


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor as the checkpoint's header describes it."""

    shape: tuple[int, ...]
    num_bytes: int  # in the file
    stored_as: str  # "float32", "bfloat16", "float16", a `BlockKind`, or another type that is widened when it is read
    file: Path


class TensorTable(dict[str, TensorInfo]):
    """All tensors of an open checkpoint under their Hugging Face names, and facts that follow from them.

    A table never changes, so each fact is computed once.
    """

    @cached_property
    def files(self) -> list[Path]:
        """The files with tensors, sorted."""
        return sorted({info.file for info in self.values()})

    @cached_property
    def num_values(self) -> int:
        """Numbers in all tensors."""
        return sum(prod(info.shape) for info in self.values())

    def hashed(self) -> HASH:
        """Return a new hash object over all names, shapes and types, to add to."""
        return self._hash.copy()

    @cached_property
    def _hash(self) -> HASH:
        digest, file_names = sha256(), {file: file.name for file in self.files}
        for name, it in sorted(self.items()):
            digest.update(repr((name, it.shape, it.stored_as, it.num_bytes, file_names[it.file])).encode())
        return digest


def commonest_dtype(tensors: Iterable[TensorInfo]) -> str:
    """Return the dtype most bytes are stored in; float32 for types that are widened."""
    num_bytes: Counter[str] = Counter()
    for info in tensors:
        num_bytes[info.stored_as if info.stored_as in FLOATS else "float32"] += info.num_bytes
    return num_bytes.most_common(1)[0][0]


class StoredRows(msgspec.Struct, frozen=True):
    """Some rows of a matrix, as they lie in the file."""

    values: torch.Tensor  # [n, cols] floats, or [n, bytes of a row] uint8: GGUF blocks
    numbers: NDArray[np.int64]  # [n]: which rows of the matrix they are
    block_kind: BlockKind | None = None  # of blocks


class Checkpoint(Protocol):
    """A model on disk."""

    @property
    def path(self) -> Path:
        """The folder or file the user named."""
        ...

    @property
    def config_file(self) -> Path:
        """The file that `config` was read from, for error messages."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """`config.json` in Hugging Face keys; for GGUF, translated from its metadata."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """`generation_config.json` likewise; empty if there is none."""
        ...

    @property
    def tensors(self) -> TensorTable:
        """All tensors under their Hugging Face names."""
        ...

    @property
    def dtype(self) -> str:
        """The floating-point type that most weights are stored in, float32 for quantized ones: "bfloat16"."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, quantized ones widened to float32.

        Raises: CheckpointError if the bytes are missing or damaged.
        """
        ...

    def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows [start, stop) of a matrix, counted as they lie in the file; threads may read at once.

        Raises: as `read` does.
        """
        ...

    def close(self) -> None:
        """Release file handles; the object is of no use afterwards."""
        ...
