"""Files that are old or new, never half written, whatever happens to process or power; and ids for them.

What a disk has damaged all the same is set aside under another name, so that it concerns nothing but itself.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from moeflow.core.durable import sync

DAMAGED = ".damaged"  # the suffix of what is set aside

Kind = TypeVar("Kind", bound=BaseModel)
logger = logging.getLogger(__name__)


def write_json(path: Path, value: BaseModel) -> None:
    """Replace a file's contents; see `replacing`. Raises: OSError."""
    with replacing(path) as file:
        file.write(value.model_dump_json().encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which replaces another at the end. If that fails, the old contents are there.

    Blocks: on the disk.
    Raises: OSError.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read_all(folder: Path, kind: type[Kind], id_of: Callable[[Kind], str]) -> tuple[dict[str, Kind], list[str]]:
    """Return what the folder's JSON files hold, by id, and the ids of damaged ones.

    Damaged files are renamed, and named again at each start until there is a sound one under their old name.

    Raises: OSError if the folder cannot be read, or a file cannot be renamed.
    """
    found: dict[str, Kind] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            value = kind.model_validate_json(path.read_bytes())
            if id_of(value) != path.stem:
                raise ValueError(f"it is about {id_of(value)[:80]!r}")
            found[path.stem] = value
        except (ValueError, OSError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            logger.error("%s is damaged and now called %s: %s", path, path.stem + DAMAGED, reason)
            path.replace(path.with_suffix(DAMAGED))
    return found, sorted(path.stem for path in folder.glob(f"*{DAMAGED}") if path.stem not in found)


def new_id(prefix: str, now_s: float) -> str:
    """Return an id for something made now; later ones sort behind earlier ones."""
    return f"{prefix}{int(now_s * 1e9):016x}{uuid.uuid4().hex[:8]}"


def made_at(name: str) -> int:
    """Return when an id was made, in unix seconds; 0 if it has no time in it."""
    try:
        return int(re.split("[-_]", name)[1][:16], 16) // 10**9
    except (IndexError, ValueError):
        return 0
