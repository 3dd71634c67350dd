"""A folder as FasterTransformer takes it: config.ini, and model.*.bin with bare numbers.

Such files say nothing of themselves: shapes follow from config.ini, and each file has to be as large as they make it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeflow.checkpoint.checkpoint import StoredRows, TensorInfo, TensorTable
from moeflow.checkpoint.faster_transformer.layout import Stored, find_stored
from moeflow.checkpoint.faster_transformer.settings import read_settings
from moeflow.checkpoint.file_errors import check_num_tensors, known_tensor
from moeflow.checkpoint.kept_matrices import KeptMatrices
from moeflow.checkpoint.raw_file import RawFile
from moeflow.checkpoint.regular_file import stat_file
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG: Final = "config.ini"
_VALUE_BYTES: Final = {"float16": 2, "float32": 4}


class FasterTransformerFolder:
    """A `Checkpoint` in such a folder."""

    def __init__(self, path: Path) -> None:
        """Read config.ini and the files' sizes.

        Raises: CheckpointError, naming file and remedy, if a file is missing or of another size.
        """
        self.path = path
        self.config_file = path / _CONFIG
        settings = read_settings(self.config_file)
        self._num_ranks, self.dtype = settings.num_ranks, settings.dtype
        has_head = (path / "model.lm_head.weight.bin").exists()
        self.config: Mapping[str, Any] = settings.config | {"tie_word_embeddings": not has_head}
        self.generation_config: Mapping[str, Any] = {}
        _check_counts(self.config, settings.num_ranks, self.config_file)
        self._stored = dict(find_stored(self.config, settings.num_ranks, has_head))
        self._check_files()
        self.tensors = TensorTable({name: self._info(stored) for name, stored in self._stored.items()})
        self._matrices = KeptMatrices(self.read)

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU; raises as `Checkpoint.read` does."""
        stored = known_tensor(self._stored, name, self.path)
        parts = [self._read_file(file, stored, name) for file in self._names(stored)]
        whole = torch.cat(parts, dim=stored.cut_axis) if len(parts) > 1 else parts[0]
        return whole.t().contiguous() if stored.is_turned else whole

    def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows of a matrix; raises as `Checkpoint.read` does."""
        return self._matrices.rows(name, start, stop)

    def close(self) -> None:
        """Release the buffers; no file stays open."""
        self._matrices.clear()

    def _names(self, stored: Stored) -> list[str]:
        """Return the names of the files that a tensor is in."""
        is_cut = "{}" in stored.file
        return [stored.file.format(rank) for rank in range(self._num_ranks)] if is_cut else [stored.file]

    def _read_file(self, file: str, stored: Stored, name: str) -> Tensor:
        num_bytes = prod(stored.shape) * _VALUE_BYTES[self.dtype]
        opened = RawFile(self.path / file)
        try:
            data = opened.read(stored.part * num_bytes, num_bytes, name)
        finally:
            opened.close()
        values = data.view(getattr(torch, self.dtype)).reshape(stored.shape)
        return values if stored.take is None else values[:, stored.take].contiguous()

    def _info(self, stored: Stored) -> TensorInfo:
        shape = list(stored.shape if stored.take is None else (stored.shape[0], *stored.shape[2:]))
        names = self._names(stored)
        shape[stored.cut_axis] *= len(names)
        num_bytes = prod(shape) * _VALUE_BYTES[self.dtype]
        return TensorInfo(
            tuple(reversed(shape) if stored.is_turned else shape), num_bytes, self.dtype, self.path / names[0]
        )

    def _check_files(self) -> None:
        """Raise CheckpointError unless each file holds the parts that tensors take of it, and no more."""
        check_num_tensors(len(self._stored), self.path)
        sizes: dict[str, int] = defaultdict(int)
        for stored in self._stored.values():
            num_bytes = (stored.part + 1) * prod(stored.shape) * _VALUE_BYTES[self.dtype]
            for file in self._names(stored):
                sizes[file] = max(sizes[file], num_bytes)
        for name, expected in sizes.items():
            found = stat_file(self.path / name).st_size
            if found != expected:
                raise CheckpointError(
                    f"has {found} bytes, where {_CONFIG} makes it {expected}",
                    file=self.path / name,
                    remedy="Check that it belongs to these weights, or convert the model again",
                )


def is_faster_transformer_folder(path: Path) -> bool:
    """Return whether a folder without a config.json has FasterTransformer's settings."""
    return (path / _CONFIG).exists()


def _check_counts(config: Mapping[str, Any], num_ranks: int, file: Path) -> None:
    """Raise CheckpointError if the files' number or sizes are unclear."""
    reader = ConfigReader(config, file)
    num_layers, num_experts = config["num_hidden_layers"], max(config["num_experts"], 1)
    check_num_tensors(num_layers * num_experts, file.parent)
    for name in ("num_attention_heads", "intermediate_size"):
        if config[name] % num_ranks:
            raise reader.error(f"'tensor_para_size' is {num_ranks}, which does not divide {config[name]} ({name})")
    if not isinstance(config["moe_layers"], list):
        raise reader.error("'moe_layers' is no list of numbers")
