"""Small JSON files that are old or new, never half written, whatever happens to process or power; and ids for them.

What a disk has damaged all the same is set aside under another name, so that it concerns nothing but itself.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from moeflow.core.durable import sync

DAMAGED = ".damaged"  # the suffix of what is set aside

logger = logging.getLogger(__name__)


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


def read_all(folder: Path, kind: type[Any], id_of: Callable[[Any], str]) -> tuple[dict[str, Any], list[str]]:
    """Return what the folder's JSON files hold, as values of a msgspec struct by id, and the ids of damaged ones.

    Damaged files are renamed, and named again at each start until there is a sound one under their old name.

    Raises: OSError if the folder cannot be read, or a file cannot be renamed.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            value = msgspec.json.decode(path.read_bytes(), type=kind)
            if id_of(value) != path.stem:
                raise msgspec.ValidationError(f"it is about {id_of(value)[:80]!r}")
            found[path.stem] = value
        except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
            logger.error("%s is damaged and now called %s: %s", path, path.stem + DAMAGED, error)
            path.replace(path.with_suffix(DAMAGED))
    return found, sorted(path.stem for path in folder.glob(f"*{DAMAGED}") if path.stem not in found)


def new_id(prefix: str, now_s: float) -> str:
    """Return an id for something made now; later ones sort behind earlier ones."""
    return f"{prefix}{int(now_s * 1e9):016x}{uuid.uuid4().hex[:8]}"


def made_at(name: str) -> int:
    """Return when an id was made, in unix seconds; 0 if it does not say."""
    try:
        return int(re.split("[-_]", name)[1][:16], 16) // 10**9
    except (IndexError, ValueError):
        return 0
