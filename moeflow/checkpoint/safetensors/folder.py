"""A Hugging Face folder: config.json and safetensors files, one or sharded with an index.

Opening reads every shard's header and holds index and shards against each other; weights are read tensor by
tensor. Nothing in the folder is ever executed: `auto_map` and other pointers to code in config.json are
ignored, pickled weights are refused. Tokenizer and chat template are not looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from moeflow.checkpoint.checkpoint import StoredRows, TensorInfo, TensorTable, commonest_dtype
from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN, blame_file, check_num_tensors, known_tensor
from moeflow.checkpoint.json_file import MAX_INDEX_BYTES, read_json_object
from moeflow.checkpoint.other_kinds import refuse_other_config, refuse_other_tensors
from moeflow.checkpoint.raw_file import RawFile
from moeflow.checkpoint.safetensors.header import SafetensorsEntry, check_num_bytes, read_safetensors_header
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated, truncated_repr
from moeflow.kernels.on_demand import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # of a config; the second in old folders
_MODELOPT_FILE = "hf_quant_config.json"  # has the same where ModelOpt wrote it apart
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
CONVERT_PICKLE = (
    "Pickle can run code, so it is not read. Convert it where you trust it: transformers' "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) writes safetensors"
)

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as torch calls them
_DTYPES = _FLOATS | {  # what parts of quantized matrices are stored in, too
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
}
_NUM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
# Tables that old checkpoints carry and every implementation computes itself; in whatever dtype.
_COMPUTED_TABLE = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")
_NAMES_SHOWN = 5

_Shards = dict[Path, dict[str, SafetensorsEntry]]


class SafetensorsFolder:
    """A `Checkpoint` in a Hugging Face folder.

    If its config names a quantization, tensors are returned as stored, and `QuantizedFolder` assembles them.
    """

    def __init__(self, path: Path) -> None:
        """Read config and headers.

        Raises: CheckpointError, naming file, tensor and remedy, for anything missing, damaged,
        contradictory or of an unsupported dtype.
        """
        self.path = path
        self.config_file = path / "config.json"
        files, weight_map = _find_shards(path)
        shards = {file: read_safetensors_header(file) for file in files}
        self.config: Mapping[str, Any] = _read_config(self.config_file)
        refuse_other_config(self.config, path)
        refuse_other_tensors({name for entries in shards.values() for name in entries}, path)
        self.quantization_file = self.config_file
        settings = None if _is_quantized(self.config) else _read_modelopt_settings(path / _MODELOPT_FILE)
        if settings is not None:
            self.quantization_file = path / _MODELOPT_FILE
            self.config = {**self.config, QUANTIZATION_KEYS[0]: settings}
        generation_file = path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = (
            read_json_object(generation_file) if os.path.lexists(generation_file) else {}
        )
        _check_twins(shards)
        if weight_map is not None:
            _check_index(weight_map, shards, path)
        self._entries = {
            name: (file, entry)
            for file, entries in shards.items()
            for name, entry in entries.items()
            if not _COMPUTED_TABLE.search(name)
        }
        is_quantized = _is_quantized(self.config)
        for name, (file, entry) in self._entries.items():
            check_num_bytes(name, entry, _value_bytes(name, entry, file, _DTYPES if is_quantized else _FLOATS), file)
        if not self._entries:
            raise CheckpointError("holds no weights", file=next(iter(shards)), remedy=DOWNLOAD_AGAIN)
        check_num_tensors(len(self._entries), path)
        self.tensors = TensorTable(
            {
                name: TensorInfo(entry.shape, entry.num_bytes, _DTYPES[entry.dtype], file)
                for name, (file, entry) in self._entries.items()
            }
        )
        self.dtype: str = commonest_dtype(self.tensors.values())
        self._files = {file: RawFile(file) for file in shards}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU in the dtype it is stored in; raises as `Checkpoint.read` does."""
        file, entry = self._entry(name)
        data = self._files[file].read(entry.start, entry.num_bytes, name)
        return data.view(_torch_dtype(entry)).reshape(entry.shape)

    def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows of a matrix in the dtype it is stored in; raises as `Checkpoint.read` does."""
        return StoredRows(self.read_slices(name, start, stop, 1), np.arange(start, stop))

    def read_slices(self, name: str, start: int, stop: int, num_dims: int) -> torch.Tensor:
        """Return slices [start, stop), each of a tensor's last `num_dims` dimensions, counted over those before them.

        Shapes: [stop - start, those dimensions]. Raises: as `Checkpoint.read` does.
        """
        file, entry = self._entry(name)
        dtype, shape = _torch_dtype(entry), entry.shape[len(entry.shape) - num_dims :]
        num_bytes = prod(shape) * dtype.itemsize
        data = self._files[file].read(entry.start + start * num_bytes, (stop - start) * num_bytes, name)
        return data.view(dtype).reshape(stop - start, *shape)

    def _entry(self, name: str) -> tuple[Path, SafetensorsEntry]:
        return known_tensor(self._entries, name, self.path)

    def close(self) -> None:
        """Release the files."""
        for file in self._files.values():
            file.close()


def _find_shards(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the files with weights and the index's map from tensors to them, None for a single file.

    A single file goes before an index, as in transformers.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists() or single.is_symlink():  # a dangling link is missing data, not a folder of another kind
        return [single], None
    if not os.path.lexists(index):
        raise _no_weights(folder)
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("has no weight_map from tensors to shards", file=index, remedy=DOWNLOAD_AGAIN)
    weight_map = {tensor: _shard_name(tensor, value, index) for tensor, value in weight_map.items()}
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if _leads_nowhere(folder / name)]
    if missing:
        raise CheckpointError(
            f"names {len(names)} shards, missing of them: {_shorten(missing)}",
            file=index,
            remedy="Download the missing shards into the same folder",
        )
    return [folder / name for name in names], weight_map


def _leads_nowhere(file: Path) -> bool:
    try:
        file.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # others are reported when the file is opened
    return False


def _shard_name(tensor: str, value: Any, index: Path) -> str:
    """Return `value` if it is the plain name of a safetensors file, so that nothing outside is ever opened."""
    if not isinstance(value, str) or not re.fullmatch(r"[^/\\\x00]+\.safetensors", value):
        raise CheckpointError(
            f"its shard {truncated_repr(value)} is no plain name of a .safetensors file in this folder",
            file=index,
            tensor=tensor,
            remedy=DOWNLOAD_AGAIN,
        )
    return value


def _no_weights(folder: Path) -> CheckpointError:
    """Make the error that names the folder's contents and the remedy."""
    with blame_file(folder):
        names = sorted(entry.name for entry in folder.iterdir())
    by_suffix = {
        suffix: [name for name in names if name.endswith(suffix)] for suffix in (".gguf", ".safetensors", ".index.json")
    }
    pickled = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if by_suffix[".safetensors"]:
        problem = f"holds {_shorten(by_suffix['.safetensors'])}, but neither {SINGLE_FILE} nor {INDEX_FILE}"
        remedy = f"Download {INDEX_FILE} too, or the model in Hugging Face form"
    elif by_suffix[".gguf"]:
        problem = f"holds GGUF files: {_shorten(by_suffix['.gguf'])}"
        remedy = "Name one of these files instead of the folder"
    elif pickled:
        problem, remedy = f"holds pickled weights only: {_shorten(pickled)}", CONVERT_PICKLE
    else:
        problem = f"holds no {SINGLE_FILE}; " + (f"it holds {_shorten(names)}" if names else "it is empty")
        remedy = "Name a folder with config.json and safetensors weights, or a .gguf file"
    return CheckpointError(problem, file=folder, remedy=remedy)


def _read_config(file: Path) -> dict[str, Any]:
    if not os.path.lexists(file):
        raise CheckpointError(
            "is missing", file=file, remedy="Download it from where the weights came: it holds the model's shape"
        )
    return read_json_object(file)


def _is_quantized(config: Mapping[str, Any]) -> bool:
    return any(config.get(key) is not None for key in QUANTIZATION_KEYS)


def _read_modelopt_settings(file: Path) -> dict[str, Any] | None:
    """Return ModelOpt's description of the quantization; None: it says nothing of them, or there is no such file."""
    settings = read_json_object(file) if os.path.lexists(file) else {}
    of_weights = settings.get("quantization")
    if not isinstance(of_weights, dict) or of_weights.get("quant_algo") is None:
        return None
    return {**settings, "quant_method": "modelopt"}


def _check_twins(shards: _Shards) -> None:
    """Check that no tensor is in two shards."""
    found: dict[str, Path] = {}
    for file, entries in shards.items():
        for name in entries:
            first = found.setdefault(name, file)
            if first != file:
                raise CheckpointError(
                    f"is also in {first.name}; one of the two is wrong", file=file, tensor=name, remedy=DOWNLOAD_AGAIN
                )


def _check_index(weight_map: Mapping[str, str], shards: _Shards, folder: Path) -> None:
    """Check that index and shards name the same tensors."""
    found = {name: file.name for file, entries in shards.items() for name in entries}
    for name in sorted(weight_map.keys() | found.keys()):
        said, is_in = weight_map.get(name), found.get(name)
        if said != is_in:
            raise CheckpointError(
                f"the index says it is in {said or 'no shard'}, it is in {is_in or 'none'}",
                file=folder / (said or is_in or INDEX_FILE),
                tensor=name,
                remedy="Index and shards are not of one model: download all of them again",
            )


def _torch_dtype(entry: SafetensorsEntry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, _DTYPES[entry.dtype])
    return dtype


def _value_bytes(name: str, entry: SafetensorsEntry, file: Path, supported: Mapping[str, str]) -> int:
    if entry.dtype not in supported:
        raise CheckpointError(
            f"is stored in {truncated(entry.dtype)}; supported are {', '.join(supported)}",
            file=file,
            tensor=name,
            remedy="Use a version of the model with unquantized weights",
        )
    return _NUM_BYTES[entry.dtype]


def _shorten(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
