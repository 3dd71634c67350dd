"""The phases of all trainings and of upcycling, for progress bars."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Phase(StrEnum):
    """A phase, with the unit of its progress."""

    READING = "reading"  # bytes
    CALIBRATING = "calibrating"  # tokens
    FITTING = "fitting"  # layers
    BRANCHES = "branches"  # seconds, or steps if their number is given
    ROUTERS = "routers"  # layers
    JOINT = "joint"  # seconds, or steps if their number is given
    LOADING = "loading"  # bytes
    TEXT = "text"  # seconds, or tokens if their number is given
    TOKENS = "tokenizing"  # files
    ENLARGING = "enlarging"  # classifiers
    TRAINING = "training"  # seconds, or steps or epochs if their number is given
    MEASURING = "measuring"  # sets of texts, or tokens
    WRITING = "writing"  # bytes


OnDone = Callable[[int, int], None]  # done, total
OnProgress = Callable[[Phase, int, int], None]  # phase, done, total


def ignore(phase: Phase, done: int, total: int) -> None:
    """Report to no one."""
