"""What goes wrong with any file, said in a way that names the file and the remedy.

Knows no format and no tensors: readers of metadata use it without loading torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from moeflow.core.errors import CheckpointError

DOWNLOAD_AGAIN = "Download or copy the file again"

MAX_TENSORS = 1 << 18  # of a model, each expert's counted: some times what the largest have

T = TypeVar("T")

_LFS_POINTER = b"version https://git-lfs"


@contextmanager
def blame_file(file: Path, tensor: str | None = None) -> Iterator[None]:
    """Turn what the operating system complains about into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot be read ({error.strerror or error})",
            file=file,
            tensor=tensor,
            remedy="Check that the file is there and that you may read it",
        ) from error


def check_num_tensors(count: int, path: Path) -> None:
    """Raise CheckpointError if a model has more tensors than fit into memory by name."""
    if count > MAX_TENSORS:
        raise CheckpointError(
            f"holds {count} tensors, where at most {MAX_TENSORS} are expected", file=path, remedy=DOWNLOAD_AGAIN
        )


def known_tensor(found: Mapping[str, T], name: str, path: Path) -> T:
    """Return the entry of a tensor. Raises: CheckpointError if the checkpoint at `path` has none."""
    if name not in found:
        raise CheckpointError("is not in the checkpoint", file=path, tensor=name, remedy=DOWNLOAD_AGAIN)
    return found[name]


def refuse_lfs_pointer(start: bytes, file: Path) -> None:
    """Raise CheckpointError if a file's first bytes show that Git left a pointer in place of the weights."""
    if start and _LFS_POINTER.startswith(start[: len(_LFS_POINTER)]):
        raise CheckpointError(
            "is a Git LFS pointer, not the weights themselves",
            file=file,
            remedy="Run `git lfs pull` in the folder, or download the file itself",
        )
