"""What every reader offers, whatever the file format: Hugging Face names, shapes and settings.

Opening reads headers only. A model's loader asks `tensors` for what there is and `read` for one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the checkpoint's header describes it."""

    shape: tuple[int, ...]
    num_bytes: int  # in the file
    file: Path


class Checkpoint(Protocol):
    """A model on disk."""

    @property
    def path(self) -> Path:
        """The folder or file the user named."""
        ...

    @property
    def config_file(self) -> Path:
        """The file that `config` was read from, for error messages."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """`config.json` in Hugging Face keys; for GGUF, translated from its metadata."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """`generation_config.json` likewise; empty if there is none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors under their Hugging Face names."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type to compute in if the user does not choose: what the weights were stored in."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, quantized ones widened to float32.

        Raises: CheckpointError if the bytes are missing or damaged.
        """
        ...

    def close(self) -> None:
        """Release file handles; the object is of no use afterwards."""
        ...
