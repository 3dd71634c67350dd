"""Reads a user's text file."""

from __future__ import annotations

import codecs
from pathlib import Path

from moeflow.core.errors import ConfigError


def read_text(file: Path, max_bytes: int | None = None) -> str:
    """Return the text without a byte order mark, cut after `max_bytes`.

    Raises: ConfigError if the file cannot be read, or is not UTF-8.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(-1 if max_bytes is None else max_bytes)
        is_whole = max_bytes is None or len(data) < max_bytes
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=is_whole).replace("\r\n", "\n")
    except OSError as error:
        raise ConfigError(f"cannot read the text {file}: {error.strerror}. Name another file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text; convert it first") from error
