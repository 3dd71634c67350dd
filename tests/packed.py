"""Packed weights beside a tiny model: processes that run it start without torch, whose import takes seconds each."""

from __future__ import annotations

from pathlib import Path

from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack


def pack_beside(folder: Path, cache_dir: Path | None = None) -> None:
    """Pack a model where an engine finds it whose cache folder is `cache_dir`, or else the model's own folder.

    Without the extension nothing is packed, and engines start from the model itself.
    """
    if extension.is_available():
        pack(str(folder), None, cache_dir=cache_dir or folder)
