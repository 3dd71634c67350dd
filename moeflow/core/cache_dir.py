"""The default folder for files that can be rebuilt."""

from __future__ import annotations

from pathlib import Path


def cache_folder(asked: Path | None) -> Path:
    """Return the folder that is asked for, or the user's own."""
    return asked or Path.home() / ".cache" / "moeflow"


def existing_folder(folder: Path) -> Path:
    """Return the folder, or where it would be made: the nearest one above it that is there."""
    return next(it for it in (folder, *folder.absolute().parents) if it.exists())
