"""JSON, TOML and the files that hold them, as others wrote them: read within bounds, and with one error.

A parser has several ways to fail on hostile text: deep nesting, numbers of too many digits, bytes that are not UTF-8.
Callers catch `UnreadableError` alone, and add the file and the remedy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NoReturn

from moeflow.core.truncated_repr import truncated, truncated_repr
from moeflow.core.units import MIB, format_bytes
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    import tomllib

MAX_SETTINGS_BYTES: Final = 8 * MIB  # of a file that people or moeflow write
_MAX_TOML_BYTES: Final = MIB  # which takes Python a second to read
_MAX_VALUES: Final = 1_000_000  # a few hundred megabytes once they are Python's


class UnreadableError(ValueError):
    """A text or a file cannot be read; the message gives the reason."""


def read_bounded(file: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> bytes:
    """Return what a file or a pipe holds. Raises: UnreadableError if that is more than `max_bytes`, or fails."""
    try:
        with file.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise UnreadableError(getattr(error, "strerror", None) or str(error)) from None
    if len(data) > max_bytes:
        raise UnreadableError(f"it is larger than {format_bytes(max_bytes)}")
    return data


def parse_json(data: bytes | str, *, allows_nan: bool = False) -> Any:
    """Return the value of a JSON text; `allows_nan`: also NaN and infinity, as Python writes them.

    Raises: UnreadableError.
    """
    text = _decoded(data)
    if sum(map(text.count, ",[{")) > _MAX_VALUES:
        raise UnreadableError(f"it holds more than {_MAX_VALUES} values")
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=None if allows_nan else _refuse)
    except RecursionError:
        raise UnreadableError("it nests too deeply") from None
    except ValueError as error:
        raise UnreadableError(truncated(str(error))) from None


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the table of a TOML text. Raises: UnreadableError."""
    if len(data) > _MAX_TOML_BYTES:
        raise UnreadableError(f"it is larger than {format_bytes(_MAX_TOML_BYTES)}")
    try:
        return tomllib.loads(_decoded(data))
    except RecursionError:
        raise UnreadableError("it nests too deeply") from None
    except ValueError as error:
        raise UnreadableError(truncated(str(error))) from None


def _refuse(name: str) -> NoReturn:
    raise UnreadableError(f"{name} is no number in JSON")


def _decoded(data: bytes | str) -> str:
    try:
        return data if isinstance(data, str) else data.decode("utf-8-sig")  # editors on Windows write a byte order mark
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is no UTF-8 text ({error.reason} at byte {error.start})") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise UnreadableError(f"the key {truncated_repr(key)} occurs twice")
        value[key] = item
    return value
