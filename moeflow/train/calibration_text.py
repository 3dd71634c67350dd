"""The text to fit routers on, and a held-out part to measure with.

Knows no model: text in, token ids out. `calibration/SOURCES.md` lists the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from moeflow.core.errors import ConfigError
from moeflow.train.text_file import read_text

CALIBRATION_FOLDER = Path(__file__).parent / "calibration"
MAX_FITTING_TOKENS = 16384
_BYTES_PER_TOKEN = 8  # and fewer in any text
_HELD_OUT_SHARE = 10  # one part of 10
_MIN_TOKENS = 40


class CalibrationText(msgspec.Struct, frozen=True):
    """Token ids, one list a domain."""

    fitting: list[list[int]]
    held_out: list[list[int]]  # the last tenth of each
    names: list[str]


def calibration_text(encode: Callable[[str], list[int]], file: Path | None = None) -> CalibrationText:
    """Return the user's text, or the text of the package. Raises: as `named_text`."""
    return named_text(encode, package_files() if file is None else {file.stem: file}, MAX_FITTING_TOKENS)


def package_files() -> dict[str, Path]:
    """Return the text files of the package by name."""
    return {file.stem: file for file in sorted(CALIBRATION_FOLDER.glob("*.txt"))}


def named_text(encode: Callable[[str], list[int]], files: Mapping[str, Path], max_tokens: int) -> CalibrationText:
    """Return the first `max_tokens` of each file.

    Raises: ConfigError if a file cannot be read, is not UTF-8 or is too short.
    """
    fitting, held_out = [], []
    for path in files.values():
        token_ids = encode(read_text(path, _BYTES_PER_TOKEN * max_tokens))[:max_tokens]
        if len(token_ids) < _MIN_TOKENS:
            raise ConfigError(f"calibration text {path} has {len(token_ids)} tokens; use at least {_MIN_TOKENS}")
        cut = len(token_ids) - len(token_ids) // _HELD_OUT_SHARE
        fitting.append(token_ids[:cut])
        held_out.append(token_ids[cut:])
    return CalibrationText(fitting, held_out, list(files))
