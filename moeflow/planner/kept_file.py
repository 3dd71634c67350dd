"""Small files of the cache folder that are there whole or not at all, whoever else writes them."""

from __future__ import annotations

import os
from pathlib import Path


def keep(file: Path, content: bytes) -> None:
    """Write a file, or put it in the place of one. Raises: OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        new.write_bytes(content)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
