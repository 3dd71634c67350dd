"""What is kept of work that is not finished, so that it goes on where it stopped: safetensors and JSON.

A file is written under another name and renamed: after a kill it is whole, or the one before.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeflow.checkpoint.json_file import read_json_object
from moeflow.core.errors import CheckpointError, ConfigError

_RECIPE = "recipe.json"
_REMEDY = "Remove the folder to begin anew"


class WorkFolder:
    """A folder that one process has."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
        """Keep tensors, and what can be said in JSON of them. Raises: ConfigError if there is no room; OSError."""
        file = self._file(name)
        unfinished = file.with_suffix(".unfinished")
        texts = {key: json.dumps(value) for key, value in (metadata or {}).items()}
        try:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, unfinished, texts)
        except SafetensorError as error:  # a full disk, for one
            unfinished.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot write to {self.path}: {error}. Free some space, or choose a place (--out)"
            ) from error
        unfinished.rename(file)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return what was kept; None if nothing was. Raises: CheckpointError if it is damaged."""
        file = self._file(name)
        if not file.exists():
            return None
        try:
            with safe_open(file, "pt") as opened:
                texts = opened.metadata() or {}
            return load_file(file), {key: json.loads(text) for key, text in texts.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"cannot be read ({error})", file=file, remedy=_REMEDY) from error

    def check_recipe(self, recipe: dict[str, Any]) -> None:
        """Keep what is to be done. Raises: ConfigError if what is here was begun for something else."""
        file = self.path / _RECIPE
        if not file.exists():
            file.write_text(json.dumps(recipe, indent=2), encoding="utf-8")
        elif (before := read_json_object(file)) != json.loads(json.dumps(recipe)):
            changed = ", ".join(key for key in recipe if before.get(key) != recipe[key])
            raise ConfigError(
                f"{self.path} has unfinished work with another {changed}. Give the options that it was begun with, or "
                "begin anew (--restart)"
            )

    def clear(self) -> None:
        """Remove everything but the lock."""
        for file in self.path.iterdir():
            if file.name != ".lock":
                file.unlink()

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"


@contextmanager
def work_folder(path: Path) -> Iterator[WorkFolder]:
    """Yield the folder, which this process alone has until it ends; it is removed if there is nothing in it then.

    Raises: ConfigError if it cannot be made, or another process has it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write to {path.parent}: {error.strerror}. Choose another place (--out)") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process trains for {path.parent} already; wait for it") from error
        yield WorkFolder(path)
        if [file.name for file in path.iterdir()] == [".lock"]:
            shutil.rmtree(path)
    finally:
        os.close(handle)
