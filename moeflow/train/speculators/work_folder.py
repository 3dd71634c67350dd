"""What is kept of work that is not finished, so that it goes on where it stopped: safetensors and JSON.

A file is written under another name and renamed: after a kill it is whole, or the one before.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeflow.checkpoint.json_file import read_json_object
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.train.speculators.teacher_text import TeacherText
from moeflow.train.speculators.training import Progress

_RECIPE = "recipe.json"
_REMEDY = "Remove the folder to begin anew"


class WorkFolder:
    """A folder that one process has."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def texts(self) -> list[TeacherText]:
        """Return the text so far, round by round. Raises: CheckpointError."""
        found: list[TeacherText] = []
        while (file := self._text_file(len(found))).exists():
            found.append(TeacherText(**_load(file)))
        return found

    def add_text(self, text: TeacherText, number: int) -> None:
        """Keep a round's text. Raises: OSError."""
        self._save(self._text_file(number), text.tensors(), {})

    def save_training(self, number: int, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Keep a speculator's training. Raises: OSError."""
        self._save(self._training_file(number), tensors, {"progress": json.dumps(asdict(progress))})

    def training(self, number: int) -> tuple[Progress, dict[str, Tensor]] | None:
        """Return a speculator's training; None if it has not begun. Raises: CheckpointError."""
        file = self._training_file(number)
        if not file.exists():
            return None
        tensors = _load(file)
        with safe_open(file, "pt") as opened:
            return Progress(**json.loads(opened.metadata()["progress"])), tensors

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

    def _text_file(self, number: int) -> Path:
        return self.path / f"text-{number:05d}.safetensors"

    def _training_file(self, number: int) -> Path:
        return self.path / f"training-{number}.safetensors"

    def _save(self, file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        unfinished = file.with_suffix(".unfinished")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
        except SafetensorError as error:  # a full disk, for one
            unfinished.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot write to {self.path}: {error}. Free some space, or choose a place (--out)"
            ) from error
        unfinished.rename(file)


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
            raise ConfigError(f"another process trains speculators in {path.parent} already; wait for it") from error
        yield WorkFolder(path)
        if [file.name for file in path.iterdir()] == [".lock"]:
            shutil.rmtree(path)
    finally:
        os.close(handle)


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot be read ({error})", file=file, remedy=_REMEDY) from error
