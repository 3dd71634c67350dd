"""JSON files and headers that must hold one object, or one list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN
from moeflow.checkpoint.regular_file import read_whole
from moeflow.core.errors import CheckpointError
from moeflow.core.units import MIB
from moeflow.core.untrusted import UnreadableError, parse_json

MAX_CONFIG_BYTES = 8 * MIB  # the longest that are known list every layer of a quantized model
MAX_INDEX_BYTES = 32 * MIB  # names of a quarter of a million tensors


def read_json_object(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises: CheckpointError if the file cannot be read, is not regular, is larger than `max_bytes`, or does not hold a
    JSON object with unique keys.
    """
    return parse_json_object(read_whole(file, max_bytes), file)


def read_json_list(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> list[Any]:
    """Return the list that a JSON file holds. Raises: as `read_json_object`, for something else than a list."""
    value = _parse_json(read_whole(file, max_bytes), file)
    if not isinstance(value, list):
        raise _wrong_type(value, "a list", file)
    return value


def parse_json_object(data: bytes, file: Path) -> dict[str, Any]:
    """Return the object in `data`, which came from `file`; raises as `read_json_object` does."""
    value = _parse_json(data, file)
    if not isinstance(value, dict):
        raise _wrong_type(value, "an object", file)
    return value


def _wrong_type(value: Any, expected: str, file: Path) -> CheckpointError:
    return CheckpointError(
        f"holds a JSON {type(value).__name__}, where {expected} is expected", file=file, remedy=DOWNLOAD_AGAIN
    )


def _parse_json(data: bytes, file: Path) -> Any:
    try:
        return parse_json(data, allows_nan=True)
    except UnreadableError as error:
        raise CheckpointError(f"does not hold valid JSON ({error})", file=file, remedy=DOWNLOAD_AGAIN) from error
