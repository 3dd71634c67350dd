"""Which reader a path needs."""

from __future__ import annotations

from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.file_errors import blame_file
from moeflow.checkpoint.gguf_file import GGUFFile
from moeflow.checkpoint.safetensors_folder import CONVERT_PICKLE, PICKLE_SUFFIXES, SafetensorsFolder
from moeflow.core.errors import CheckpointError

_WHAT_TO_NAME = "Name a Hugging Face folder (config.json and safetensors) or a .gguf file on this machine"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder or a GGUF file; reads headers only.

    Raises: CheckpointError if there is nothing of the kind, or it is damaged or not supported.
    """
    path = Path(path)
    if path.is_dir():
        return SafetensorsFolder(path)
    if not path.is_file():
        problem = "is no regular file" if path.exists() else "does not exist"
        raise CheckpointError(problem, file=path, remedy=_WHAT_TO_NAME + "; models are not downloaded")
    if path.suffix == ".gguf" or _has_gguf_magic(path):
        return GGUFFile(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError("holds pickled weights", file=path, remedy=CONVERT_PICKLE)
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(
            "is one file of a model in Hugging Face form", file=path, remedy=f"Name its folder: {path.parent}"
        )
    raise CheckpointError("is no kind of model file that is known here", file=path, remedy=_WHAT_TO_NAME)


def _has_gguf_magic(path: Path) -> bool:
    with blame_file(path), path.open("rb") as stream:
        return stream.read(4) == b"GGUF"
