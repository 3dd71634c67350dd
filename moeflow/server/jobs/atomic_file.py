"""Small JSON files that are old or new, never half written, whatever happens to process or power; and ids for them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import msgspec

from moeflow.core.durable import sync


def write_json(path: Path, value: Any) -> None:
    """Replace a file's contents. If it fails, the old ones are there.

    Blocks: on the disk.
    Raises: OSError.
    """
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read_all(folder: Path, kind: type[Any]) -> list[Any]:
    """Return what the folder's JSON files hold, as values of a msgspec struct.

    Raises: OSError, msgspec.DecodeError.
    """
    return [msgspec.json.decode(path.read_bytes(), type=kind) for path in sorted(folder.glob("*.json"))]


def new_id(prefix: str, now_s: float) -> str:
    """Return an id for something made now; later ones sort behind earlier ones."""
    return f"{prefix}{int(now_s * 1e9):016x}{uuid.uuid4().hex[:8]}"
