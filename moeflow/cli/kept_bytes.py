"""The folders that moeflow keeps on this disk: their purpose and size."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moeflow.cli import lazy

HISTORY_FILE = "chat_history.jsonl"  # the input history of `moeflow chat`
_MADE_AGAIN = ("experts", "importance", "routing")  # folders of files that are built or learnt when needed


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """A folder, or several."""

    what: str
    folder: Path
    num_bytes: int
    remedy: str  # how to be rid of it


def places(cache_dir: Path) -> list[KeptFolder]:
    """Return where what lies. Only looks."""
    hub = lazy.hub_cache()
    prompts = lazy.default_prompt_folder(cache_dir)
    builtin = sum(map(bytes_in, cache_dir.glob("builtin-*")))
    models = sum(bytes_in(folder / "blobs") for _, folder in lazy.repositories(hub))
    return [
        KeptFolder("pulled models", hub, models, "moeflow rm NAME"),
        KeptFolder("the built-in model", cache_dir, builtin, "delete builtin-* there; it is made again"),
        KeptFolder(
            "packed weights", cache_dir / "experts", bytes_in(cache_dir / "experts"), "moeflow cache --clear-packed"
        ),
        KeptFolder(
            "records of routing", cache_dir / "routing", bytes_in(cache_dir / "routing"), "moeflow cache --clear-packed"
        ),
        KeptFolder(
            "what inputs matter",
            cache_dir / "importance",
            bytes_in(cache_dir / "importance"),
            "moeflow cache --clear-packed",
        ),
        KeptFolder("prompts and answers", prompts, bytes_in(prompts), "moeflow cache --clear"),
        KeptFolder(
            "inputs of chats",
            cache_dir / HISTORY_FILE,
            bytes_in(cache_dir / HISTORY_FILE),
            "delete this file; moeflow chat begins anew",
        ),
        KeptFolder("files and batch jobs", cache_dir / "jobs", bytes_in(cache_dir / "jobs"), "the server's API"),
    ]


def made_again(cache_dir: Path) -> list[Path]:
    """Return the files that are rebuilt when needed: packed weights and statistics learnt from models."""
    return [it for name in _MADE_AGAIN for it in sorted((cache_dir / name).glob("*"))]


def bytes_in(path: Path) -> int:
    """Return what a file or all files in a folder take; 0: it is not there."""
    if path.is_file():
        return path.stat().st_size
    files = (Path(folder, file) for folder, _, names in os.walk(path) for file in names)
    return sum(file.stat().st_size for file in files if file.is_file())
