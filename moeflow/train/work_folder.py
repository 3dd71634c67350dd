"""Unfinished work in a folder, to resume from: safetensors with JSON metadata.

A file is written under another name and renamed, so that a kill leaves a complete one.
"""

from __future__ import annotations

import hashlib
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
_LOCK = ".lock"
_COMPLETE = ".safetensors"
_UNFINISHED = ".unfinished"
_PARTS = (_COMPLETE, _UNFINISHED)
_REMEDY = "Remove the folder to start again"


@dataclass(frozen=True, slots=True)
class StateFile:
    """Tensors and JSON values in one file."""

    path: Path

    def save(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
        """Replace the file. Raises: ConfigError if the disk is full; OSError."""
        unfinished = self.path.with_suffix(_UNFINISHED)
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
        return StateFile(self.path / f"{name}{_COMPLETE}")

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
        """Remove the recipe and all parts, the recipe last: it marks the folder as work of a training."""
        for file in self.path.iterdir():
            if file.suffix in _PARTS:
                file.unlink()
        (self.path / _RECIPE).unlink(missing_ok=True)


@contextmanager
def work_folder(path: Path, *, may_have_parts: bool = False) -> Iterator[WorkFolder]:
    """Yield the folder, locked for this process. An empty one is removed at the end.

    `may_have_parts`: it may have parts from elsewhere, without a recipe. Raises: ConfigError if it cannot be made,
    holds files of other work, or another process holds it.
    """
    if not may_have_parts:
        _check_is_own(path)
    with folder_lock(path, "--out", waits=False):
        try:
            yield WorkFolder(path)
        finally:
            if [file.name for file in path.iterdir()] == [_LOCK]:
                shutil.rmtree(path)


def _check_is_own(path: Path) -> None:
    """Raise ConfigError if an existing folder has files, but no recipe of a training."""
    if path.is_dir() and not (path / _RECIPE).exists() and any(file.name != _LOCK for file in path.iterdir()):
        raise ConfigError(
            f"{path} is the place of unfinished work, but it holds other files. Move them, or choose another folder "
            "(--out)"
        )


def digest_of(value: Any) -> str:
    """Return a hash of a JSON value, to recognize the same input later."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
