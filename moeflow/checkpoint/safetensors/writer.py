"""Writes a model's weights as Hugging Face does: bf16 safetensors shards with an index.

Shards are laid out from the shapes beforehand and filled in order, so one tensor at a time is in memory
however large the model is. Knows nothing about models. Format: the safetensors README (a little-endian
64-bit header length, a JSON header, the tensors' bytes).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

MAX_SHARD_BYTES = 10**9
_BYTES_PER_VALUE = 2

Shapes = Mapping[str, tuple[int, ...]]


def write_safetensors(
    folder: Path,
    shapes: Shapes,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:
    """Write `tensors`, which come in the order of `shapes`.

    Shapes: any; bf16. on_bytes(bytes_done, bytes_total) is called after each tensor.
    """
    shards = _split(shapes, max_shard_bytes)
    total_bytes = weight_bytes(shapes)
    done_bytes = 0
    stream = iter(tensors)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = "model.safetensors"
        if len(shards) > 1:
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file_name)
        shard_shapes = {name: shapes[name] for name in names}
        for num_bytes in _write_shard(folder / file_name, shard_shapes, stream):
            done_bytes += num_bytes
            if on_bytes is not None:
                on_bytes(done_bytes, total_bytes)
    if len(shards) > 1:
        metadata = {"total_parameters": total_bytes // _BYTES_PER_VALUE, "total_size": total_bytes}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def weight_bytes(shapes: Shapes) -> int:
    """Bytes of all tensors in bf16, headers left out."""
    return sum(map(_num_bytes, shapes.values()))


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file as Hugging Face lays it out."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _num_bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _BYTES_PER_VALUE


def _split(shapes: Shapes, max_shard_bytes: int) -> list[list[str]]:
    """Cut the names into shards, in order; a tensor above the limit gets a shard of its own."""
    shards: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = _num_bytes(shape)
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_shard(file: Path, shapes: Shapes, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[int]:
    """Write one file and yield the size of each tensor once it is written."""
    with file.open("wb") as stream:
        stream.write(_header(shapes))
        for expected, shape in shapes.items():
            name, tensor = next(tensors)
            assert (name, tuple(tensor.shape), tensor.dtype) == (expected, shape, torch.bfloat16)
            stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            yield _num_bytes(shape)


def _header(shapes: Shapes) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        stop = start + _num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start on an 8-byte border
    return len(text).to_bytes(8, "little") + text
