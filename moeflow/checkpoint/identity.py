"""Tells one checkpoint from another without reading weights: for files that are made from it and must fit it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.file_errors import blame_file


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """Return a hash over names, shapes and types of all tensors, and names, sizes and times of their files.

    A copy of the checkpoint has another identity unless it keeps the files' times. Raises: CheckpointError if a
    file is gone.
    """
    digest = hashlib.sha256()
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(repr((name, info.shape, info.stored_as, info.num_bytes, info.file.name)).encode())
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        digest.update(repr((file.name, *_size_and_time(file))).encode())
    return digest.hexdigest()[:32]


def _size_and_time(file: Path) -> tuple[int, int]:
    with blame_file(file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns
