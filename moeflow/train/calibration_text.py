"""The text that routers are fitted on, and the part of it that is kept to measure with.

Knows no model: text in, token ids out. Where the text comes from is written in `calibration/SOURCES.md`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path

import msgspec

from moeflow.core.errors import ConfigError

CALIBRATION_FOLDER = Path(__file__).parent / "calibration"
MAX_FITTING_TOKENS = 16384
_MAX_BYTES = 8 * MAX_FITTING_TOKENS  # of one file: more would only be cut off
_HELD_OUT_SHARE = 10  # one in so many
_MIN_TOKENS = 40


class CalibrationText(msgspec.Struct, frozen=True):
    """Token ids, one list a domain."""

    fitting: list[list[int]]
    held_out: list[list[int]]  # the last tenth of each


def calibration_text(encode: Callable[[str], list[int]], file: Path | None = None) -> CalibrationText:
    """Return the user's text, or the text that comes with the package.

    Raises: ConfigError if the file cannot be read, is no UTF-8 text or is too short.
    """
    files = sorted(CALIBRATION_FOLDER.glob("*.txt")) if file is None else [file]
    fitting, held_out = [], []
    for path in files:
        token_ids = encode(_read(path))[:MAX_FITTING_TOKENS]
        if len(token_ids) < _MIN_TOKENS:
            raise ConfigError(f"calibration text {path} has {len(token_ids)} tokens; at least {_MIN_TOKENS} are needed")
        cut = len(token_ids) - len(token_ids) // _HELD_OUT_SHARE
        fitting.append(token_ids[:cut])
        held_out.append(token_ids[cut:])
    return CalibrationText(fitting, held_out)


def _read(file: Path) -> str:
    """Return the file's beginning; a character that the limit cuts in two is left out."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES)
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < _MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the calibration text {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the calibration text {file} is not UTF-8 text; convert it first") from error
