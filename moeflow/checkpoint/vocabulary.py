"""The ids of tokens, read without building a tokenizer. A model can draft for another with the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN
from moeflow.checkpoint.gguf.file_names import gguf_start
from moeflow.checkpoint.gguf.header import read_gguf_header
from moeflow.checkpoint.json_file import read_json_object
from moeflow.core.errors import CheckpointError
from moeflow.core.units import MIB

MAX_TOKENIZER_BYTES: Final = 64 * MIB


def read_vocabulary(path: Path) -> dict[str, int]:
    """Return the ids of a model's tokens, of a Hugging Face folder or a GGUF file, by their text as the file has it.

    Raises: CheckpointError if the model has no tokenizer, or one that cannot be read.
    """
    path = gguf_start(path)
    if path.is_dir():
        file = path / "tokenizer.json"
        return _from_json(read_json_object(file, MAX_TOKENIZER_BYTES), file)
    tokens = read_gguf_header(path).metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError("holds no tokenizer", file=path, remedy=DOWNLOAD_AGAIN)
    return {token: token_id for token_id, token in enumerate(tokens)}


def _from_json(tokenizer: dict[str, Any], file: Path) -> dict[str, int]:
    """Read the vocabulary of BPE and WordPiece (an object) or Unigram (a list of pairs), and added tokens."""
    try:
        known = tokenizer["model"]["vocab"]
        found = dict(known) if isinstance(known, dict) else {pair[0]: place for place, pair in enumerate(known)}
        found |= {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or ()}
        if all(type(token_id) is int for token_id in found.values()):
            return found
        raise TypeError("an id is no integer")
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError("does not list its tokens", file=file, remedy=DOWNLOAD_AGAIN) from error
