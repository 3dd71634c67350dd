"""What is kept of unfinished speculators: the target's text, round by round, and each training."""

from __future__ import annotations

from dataclasses import asdict

from torch import Tensor

from moeflow.train.speculators.teacher_text import TeacherText
from moeflow.train.speculators.training import Progress
from moeflow.train.work_folder import WorkFolder


class SpeculatorWork:
    """A `WorkFolder` with names for what is in it."""

    def __init__(self, folder: WorkFolder) -> None:
        self._folder = folder

    def texts(self) -> list[TeacherText]:
        """Return the text so far, round by round. Raises: CheckpointError."""
        found: list[TeacherText] = []
        while (kept := self._folder.load(_text_name(len(found)))) is not None:
            found.append(TeacherText(**kept[0]))
        return found

    def add_text(self, text: TeacherText, number: int) -> None:
        """Keep a round's text. Raises: ConfigError, OSError."""
        self._folder.save(_text_name(number), text.tensors())

    def save_training(self, number: int, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Keep a speculator's training. Raises: ConfigError, OSError."""
        self._folder.save(f"training-{number}", tensors, {"progress": asdict(progress)})

    def training(self, number: int) -> tuple[Progress, dict[str, Tensor]] | None:
        """Return a speculator's training; None if it has not begun. Raises: CheckpointError."""
        kept = self._folder.load(f"training-{number}")
        return None if kept is None else (Progress(**kept[1]["progress"]), kept[0])


def _text_name(number: int) -> str:
    return f"text-{number:05d}"
