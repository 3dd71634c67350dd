"""How the hub library's cache is laid out, which all tools of the hub share.

A repository has a folder with `blobs`, the files' bytes under their checksums; `snapshots`, for each commit a folder of
links to them; and `refs`, which map branches to commits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

COMMIT = re.compile(r"[0-9a-f]{40}")
FOLDER: Final = "models--"  # begins the folder of a repository with a model
_MAX_REF_BYTES: Final = 200


def repository_folder(repo: str, cache: Path) -> Path:
    """Return the folder of a repository in the hub's cache, whether it is there or not."""
    return cache / (FOLDER + repo.replace("/", "--"))


def repositories(cache: Path) -> Iterator[tuple[str, Path]]:
    """Yield the repositories with models in the hub's cache, and their folders."""
    for folder in sorted(cache.glob(f"{FOLDER}*--*")):
        yield folder.name.removeprefix(FOLDER).replace("--", "/"), folder


def snapshots(folder: Path) -> list[Path]:
    """Return the folders of the commits that are there of a repository; stray files beside them are left out."""
    return sorted(it for it in (folder / "snapshots").glob("*") if it.is_dir())


def commit_of(revision: str, folder: Path) -> str | None:
    """Return the commit that a revision of a repository was when it was last pulled; None: it never was."""
    if COMMIT.fullmatch(revision):
        return revision
    try:
        commit = (folder / "refs" / revision).read_text(encoding="ascii")[:_MAX_REF_BYTES].strip()
    except (OSError, UnicodeDecodeError):
        return None
    return commit if COMMIT.fullmatch(commit) else None
