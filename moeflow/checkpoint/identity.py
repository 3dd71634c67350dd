"""Identifies a checkpoint without reading all weights, for files derived from it; and names a model."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.file_errors import blame_file
from moeflow.checkpoint.gguf.file_names import whole_name
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.sha256 import sha256
from moeflow.kernels.on_demand import on_demand, torch

with on_demand(__name__):
    from moeflow.checkpoint.hub import cache_layout, file_choice, model_name

_NUM_SAMPLED: Final = 256  # sampled rows of matrices, or pieces of files: about a megabyte
_PIECE_BYTES: Final = 4096
_SNAPSHOTS: Final = "snapshots"  # holds pulled models


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """Return a hash over names, shapes and types of all tensors, and names, sizes and times of their files.

    A copy of the checkpoint has another identity unless it keeps the files' times. Each call looks at the files
    again. Raises: CheckpointError if a file is gone.
    """
    digest = checkpoint.tensors.hashed()
    for file in checkpoint.tensors.files:
        digest.update(repr((file.name, *_size_and_time(file))).encode())
    return digest.hexdigest()[:32]


def sampled_bytes(checkpoint: Checkpoint) -> str:
    """Return a hash over pieces of its files, evenly far apart, for files whose times say nothing.

    Unlike `content_fingerprint` it needs no torch, and differs for files with the same numbers in another order.
    Raises: CheckpointError if a file cannot be read.
    """
    digest = sha256()
    files = checkpoint.tensors.files
    for file in files:
        with blame_file(file), file.open("rb", buffering=0) as stream:
            step = max(file.stat().st_size * len(files) // _NUM_SAMPLED, _PIECE_BYTES)
            for start in range(0, file.stat().st_size, step):
                stream.seek(start)
                digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest()[:32]


def content_fingerprint(checkpoint: Checkpoint) -> str:
    """Return a hash over config, names, shapes and types of all tensors, and the first rows of some.

    Copies have the same wherever they lie; a model that was trained further has another. Raises: CheckpointError if a
    file cannot be read.
    """
    digest = sha256(json.dumps(dict(checkpoint.config), sort_keys=True, default=str).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(repr((name, info.shape, info.stored_as)).encode())
    matrices = sorted(name for name, info in checkpoint.tensors.items() if len(info.shape) == 2)
    for name in matrices[:: len(matrices) // _NUM_SAMPLED + 1]:
        row = checkpoint.read_rows(name, 0, 1).values.contiguous().view(-1)
        digest.update(row.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def fingerprint_of(path: str) -> str:
    """Return the content fingerprint of the checkpoint at a path. Raises: CheckpointError."""
    with closing(open_checkpoint(path)) as checkpoint:
        return content_fingerprint(checkpoint)


def called(model: Path) -> str:
    """Return what the model at a path is called: by its repository if it was pulled, else by its folder or file."""
    return pulled_name(model) or Path(whole_name(model.name)).stem


def pulled_name(path: Path) -> str | None:
    """Return the repository of a path in the hub library's cache, with a GGUF file's tag; None: it lies elsewhere."""
    name = pulled_model(path)
    return None if name is None else str(replace(name, revision=model_name.MAIN))


def pulled_model(path: Path) -> model_name.ModelName | None:
    """Return the name of a path in the hub library's cache, with its commit; None: it lies elsewhere."""
    parts = path.absolute().parts
    at = parts.index(_SNAPSHOTS) if _SNAPSHOTS in parts[1:] else 0
    if at == 0 or not parts[at - 1].startswith(cache_layout.FOLDER):
        return None
    repo = parts[at - 1].removeprefix(cache_layout.FOLDER).replace("--", "/")
    file = file_choice.tag_of("/".join(parts[at + 2 :])) if path.suffix == ".gguf" else ""
    return model_name.ModelName(repo, parts[at + 1], file)


def _size_and_time(file: Path) -> tuple[int, int]:
    with blame_file(file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns
