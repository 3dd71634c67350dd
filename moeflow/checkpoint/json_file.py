"""JSON files and headers that must hold one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN, blame_file
from moeflow.core.errors import CheckpointError


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises: CheckpointError if the file cannot be read, is no JSON, holds something else than an object, or
    the same key twice.
    """
    with blame_file(file):
        data = file.read_bytes()
    return parse_json_object(data, file)


def parse_json_object(data: bytes, file: Path) -> dict[str, Any]:
    """Return the object in `data`, which came from `file`; raises as `read_json_object` does."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, twice the same key
        raise CheckpointError(f"does not hold valid JSON ({error})", file=file, remedy=DOWNLOAD_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"holds a JSON {type(value).__name__}, where an object is expected", file=file, remedy=DOWNLOAD_AGAIN
        )
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {key!r} occurs twice")
        value[key] = item
    return value
