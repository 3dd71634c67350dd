"""Facts of a model that the headers of its files have, so that it can be described without loading it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from moeflow.checkpoint.open import open_checkpoint
from moeflow.models.registry import read_model_config


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a model's files describe."""

    model_type: str
    max_position: int  # tokens of context that the model was made for
    vocab_size: int
    num_parameters: int
    num_bytes: int  # of all tensors, as they are stored


def read_file_facts(path: str | Path) -> FileFacts:
    """Read the headers of a model's files.

    Raises: CheckpointError if they are damaged, or of a model that is not supported; OSError.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        shape = read_model_config(checkpoint)
        num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
        return FileFacts(shape.model_type, shape.max_position, shape.vocab_size, shape.num_parameters, num_bytes)
