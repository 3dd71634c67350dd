"""The texts to train experts on, one for each expert."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moeflow.core.errors import ConfigError
from moeflow.train.calibration_text import CalibrationText, named_text, package_files

MAX_TOKENS: Final = 1_000_000  # of one text
MAX_HELD_OUT_TOKENS: Final = 4096  # likewise
_MAX_VALIDATION_TOKENS: Final = 2048  # likewise
_VALIDATION_SHARE: Final = 10  # one part of 10
_NAME: Final = re.compile(r"[\w.-]+")


class LearningText(msgspec.Struct, frozen=True):
    """One text in token ids."""

    name: str
    learn: list[int]
    validation: list[int]  # for the choice of the best weights


def named_files(values: Sequence[str]) -> dict[str, Path]:
    """Read NAME=FILE or FILE. Without values, return the texts of the package.

    Raises: ConfigError if there is only one text, or a name is not unique or no plain word.
    """
    if not values:
        return package_files()
    found: dict[str, Path] = {}
    for value in values:
        name, has_name, file = value.partition("=")
        path = Path(file if has_name else value)
        name = name if has_name else path.stem
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name of a text: use letters, digits, '-', '_' and '.' (--data NAME=FILE)"
            )
        if name in found:
            raise ConfigError(f"two texts are called {name}: give each another name (--data NAME=FILE)")
        found[name] = path
    if len(found) < 2:
        raise ConfigError("--train makes one expert for each text, and there is one text: add another (--data)")
    return found


def measured_text(encode: Callable[[str], list[int]], files: Mapping[str, Path]) -> CalibrationText:
    """Return the texts, with the beginnings of their held-out parts. Raises: as `named_text`."""
    text = named_text(encode, files, MAX_TOKENS)
    return msgspec.structs.replace(text, held_out=[each[:MAX_HELD_OUT_TOKENS] for each in text.held_out])


def learning_texts(encode: Callable[[str], list[int]], files: Mapping[str, Path]) -> list[LearningText]:
    """Return the parts to learn from. Raises: as `named_text`."""
    text = named_text(encode, files, MAX_TOKENS)
    return [_split(name, fitting) for name, fitting in zip(text.names, text.fitting, strict=True)]


def _split(name: str, token_ids: list[int]) -> LearningText:
    validation = min(max(len(token_ids) // _VALIDATION_SHARE, 2), _MAX_VALIDATION_TOKENS)
    return LearningText(name, token_ids[:-validation], token_ids[-validation:])
