"""The header of a safetensors file: which tensors it holds and where.

Checks the whole format before reading weights, so that a truncated or damaged file is found when the model is opened.
Knows nothing of models or of folders.

Source: the format's description in the safetensors repository: 8 bytes little-endian header length, a JSON
object, then the tensors' bytes without holes.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN, blame_file, refuse_lfs_pointer
from moeflow.checkpoint.json_file import MAX_INDEX_BYTES, parse_json_object
from moeflow.checkpoint.regular_file import open_stream
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated_repr

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = MAX_INDEX_BYTES  # the format's own limit, 100 MB, is for more tensors than one can use
_MAX_RANK = 8


class SafetensorsEntry(msgspec.Struct, frozen=True):
    """One tensor of a file."""

    dtype: str  # as the format calls it: F32, BF16, F8_E4M3, ...
    shape: tuple[int, ...]
    start: int  # byte in the file
    num_bytes: int


def read_safetensors_header(file: Path) -> dict[str, SafetensorsEntry]:
    """Return the tensors of a file by name, in the order of their bytes.

    Raises: CheckpointError if the file is missing, cut, longer than its header says, or its header is
    damaged. Whether a tensor's dtype can be used is left to the caller.
    """
    with open_stream(file) as stream, blame_file(file):
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(_LENGTH_BYTES)
        refuse_lfs_pointer(prefix, file)
        length = _check_length(prefix, size, file)
        header = parse_json_object(stream.read(length), file)
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    entries = {name: _parse_entry(name, value, data_start, file) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    _check_layout(entries, data_start, size, file)
    return entries


def _check_length(prefix: bytes, size: int, file: Path) -> int:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES:
        problem = f"has {size} bytes, too few for a safetensors file"
    elif not 2 <= length <= _MAX_HEADER_BYTES:
        problem = f"says its header takes {length} bytes, where 2 to {_MAX_HEADER_BYTES} are expected"
    elif _LENGTH_BYTES + length > size:
        problem = f"is cut: its header takes {length} bytes, the file has {size}"
    else:
        return length
    raise CheckpointError(problem, file=file, remedy=DOWNLOAD_AGAIN)


def _parse_entry(name: str, value: Any, data_start: int, file: Path) -> SafetensorsEntry:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str):
        problem = "has no dtype"
    elif not _is_counts(shape) or len(shape) > _MAX_RANK:
        problem = f"has the shape {truncated_repr(shape)}"
    elif not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problem = f"has the data_offsets {truncated_repr(offsets)}"
    else:
        return SafetensorsEntry(dtype, tuple(shape), data_start + offsets[0], offsets[1] - offsets[0])
    raise CheckpointError(f"{problem} in a damaged header", file=file, tensor=name, remedy=DOWNLOAD_AGAIN)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(entries: dict[str, SafetensorsEntry], data_start: int, size: int, file: Path) -> None:
    """Check that the tensors fill the file: no overlap, no hole, nothing past its end."""
    position = data_start
    for name, entry in entries.items():
        end = entry.start + entry.num_bytes
        if end > size:
            problem = f"is cut: the tensor ends at byte {end}, the file has {size}"
        elif entry.start != position:
            kind = "overlaps the tensor before it" if entry.start < position else "leaves a hole before it"
            problem = f"has a damaged header: the tensor starts at byte {entry.start} and {kind}"
        else:
            position = end
            continue
        raise CheckpointError(problem, file=file, tensor=name, remedy=DOWNLOAD_AGAIN)
    if position != size:
        raise CheckpointError(f"has {size} bytes, its header describes {position}", file=file, remedy=DOWNLOAD_AGAIN)


def check_num_bytes(name: str, entry: SafetensorsEntry, itemsize: int, file: Path) -> None:
    """Raise CheckpointError unless the tensor's bytes are as many as its shape needs, and not none."""
    need = math.prod(entry.shape) * itemsize
    if need != entry.num_bytes or need == 0:
        raise CheckpointError(
            f"shape {truncated_repr(list(entry.shape))} in {entry.dtype} takes {truncated_repr(need)} bytes, "
            "the header gives it "
            f"{entry.num_bytes}",
            file=file,
            tensor=name,
            remedy=DOWNLOAD_AGAIN,
        )
