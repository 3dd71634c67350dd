"""Writes a model's weights as Hugging Face does: bf16 safetensors shards with an index.

Tensors are taken in order, and one shard of them at a time is in memory, however large the model is. Knows nothing
about models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from moeflow.kernels.on_demand import on_demand, torch

with on_demand(__name__):
    from safetensors import torch as tensor_files

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

    Shapes: any; bf16. on_bytes(bytes_done, bytes_total) is called for each tensor.
    """
    shards = _split(shapes, max_shard_bytes)
    total_bytes = weight_bytes(shapes)
    stream = _counted(tensors, total_bytes, on_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = "model.safetensors"
        if len(shards) > 1:
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file_name)
        shard_shapes = {name: shapes[name] for name in names}
        tensor_files.save_file(_take(shard_shapes, stream), folder / file_name, metadata={"format": "pt"})
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


def _counted(
    tensors: Iterable[tuple[str, torch.Tensor]], total_bytes: int, on_bytes: Callable[[int, int], None] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    done_bytes = 0
    for name, tensor in tensors:
        done_bytes += tensor.nbytes
        if on_bytes is not None:
            on_bytes(done_bytes, total_bytes)
        yield name, tensor


def _take(shapes: Shapes, tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the next tensors, which must be those of `shapes`."""
    taken = {}
    for expected, shape in shapes.items():
        name, tensor = next(tensors)
        assert (name, tuple(tensor.shape), tensor.dtype) == (expected, shape, torch.bfloat16)
        taken[name] = tensor.contiguous()
    return taken
