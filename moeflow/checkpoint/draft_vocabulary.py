"""The vocabulary of a draft model: frequent tokens only, so that its output matrix is small.

Source: FR-Spec, 2502.14856: of a small model's time the output projection over a large vocabulary is the largest part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN
from moeflow.checkpoint.json_file import read_json_object
from moeflow.checkpoint.safetensors.writer import write_json
from moeflow.core.errors import CheckpointError
from moeflow.core.units import MIB

_FILE: Final = "draft_vocabulary.json"
_KEY: Final = "token_ids"
_MAX_BYTES: Final = 8 * MIB


def write_draft_vocabulary(folder: Path, token_ids: list[int]) -> None:
    """Write the tokens that a model drafts, in ascending order, next to its weights."""
    write_json(folder / _FILE, {_KEY: token_ids})


def read_draft_vocabulary(model: Path, vocab_size: int) -> list[int] | None:
    """Return the tokens that a model drafts, in ascending order; None: all of them.

    Raises: CheckpointError if the file cannot be read, or names tokens that the model does not have.
    """
    file = model / _FILE
    if not model.is_dir() or not file.exists():
        return None
    token_ids = read_json_object(file, _MAX_BYTES).get(_KEY)
    if not isinstance(token_ids, list) or not token_ids or not all(type(each) is int for each in token_ids):
        raise CheckpointError(f"has no list of tokens {_KEY!r}", file=file, remedy=DOWNLOAD_AGAIN)
    if token_ids != sorted(set(token_ids)) or token_ids[0] < 0 or token_ids[-1] >= vocab_size:
        raise CheckpointError(
            f"must name tokens from 0 to {vocab_size - 1} in ascending order, each once",
            file=file,
            remedy=f"{DOWNLOAD_AGAIN}; without the file, the model drafts from all tokens",
        )
    return token_ids
