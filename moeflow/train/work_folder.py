"""Unfinished work in a folder, to resume from: safetensors with JSON metadata.

A file is written under another name and renamed, so that a kill leaves a complete one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeflow.checkpoint.json_file import read_json_object
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.train.folder_lock import folder_lock

_RECIPE = "recipe.json"
_REMEDY = "Remove the folder to start again"


@dataclass(frozen=True, slots=True)
class StateFile:
    """Tensors and JSON values in one file."""

    path: Path

    def save(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
        """Replace the file. Raises: ConfigError if the disk is full; OSError."""
        unfinished = self.path.with_suffix(".unfinished")
        texts = {key: json.dumps(value) for key, value in (metadata or {}).items()}
        try:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, unfinished, texts)
        except SafetensorError as error:  # such as a full disk
            unfinished.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot write to {self.path.parent}: {error}. Free some space, or choose another folder (--out)"
            ) from error
        unfinished.rename(self.path)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return tensors and metadata; None without a file. Raises: CheckpointError if it is damaged."""
        metadata = self.metadata()
        if metadata is None:
            return None
        with self._reading():
            return load_file(self.path), metadata

    def metadata(self) -> dict[str, Any] | None:
        """Return the metadata alone; None without a file. Raises: CheckpointError if it is damaged."""
        if not self.path.exists():
            return None
        with self._reading(), safe_open(self.path, "pt") as opened:
            return {key: json.loads(text) for key, text in (opened.metadata() or {}).items()}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"cannot be read ({error})", file=self.path, remedy=_REMEDY) from error


class WorkFolder:
    """A folder that one process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> StateFile:
        """Return the file of this name, which need not exist."""
        return StateFile(self.path / f"{name}.safetensors")

    def check_recipe(self, recipe: dict[str, Any]) -> None:
        """Record the options of this work. Raises: ConfigError if it was begun with others."""
        file = self.path / _RECIPE
        if not file.exists():
            file.write_text(json.dumps(recipe, indent=2), encoding="utf-8")
        elif (before := read_json_object(file)) != json.loads(json.dumps(recipe)):
            changed = ", ".join(key for key in recipe if before.get(key) != recipe[key])
            raise ConfigError(
                f"{self.path} has unfinished work with another {changed}. Repeat its options, or start again "
                "(--restart)"
            )

    def clear(self) -> None:
        """Remove everything but the lock."""
        for file in self.path.iterdir():
            if file.name != ".lock":
                file.unlink()


@contextmanager
def work_folder(path: Path) -> Iterator[WorkFolder]:
    """Yield the folder, locked for this process. An empty one is removed at the end.

    Raises: ConfigError if it cannot be made, or another process holds it.
    """
    with folder_lock(path, "--out", waits=False):
        try:
            yield WorkFolder(path)
        finally:
            if [file.name for file in path.iterdir()] == [".lock"]:
                shutil.rmtree(path)
