"""Pieces of a file, read as raw bytes.

Knows no format. Reads instead of mapping. A truncated file or a failing disk is then an error that names the file; with
a mapping it would kill the process.
"""

from __future__ import annotations

import os
from pathlib import Path

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN, blame_file
from moeflow.checkpoint.regular_file import open_regular
from moeflow.core.errors import CheckpointError
from moeflow.kernels.on_demand import torch

_MAX_READ_BYTES = 1 << 30  # Linux moves at most 2 GiB in one call


class RawFile:
    """An open file; threads may read from it at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._descriptor = open_regular(path)

    def read(self, start: int, num_bytes: int, tensor: str) -> torch.Tensor:
        """Return bytes [start, start + num_bytes) as a fresh uint8 tensor.

        Raises: CheckpointError, naming `tensor`, if the file ends before that or the disk fails.
        """
        data = torch.empty(num_bytes, dtype=torch.uint8)
        view = data.numpy().data
        done = 0
        while done < num_bytes:
            with blame_file(self.path, tensor):
                count = os.preadv(self._descriptor, [view[done : done + _MAX_READ_BYTES]], start + done)
            if count == 0:
                raise CheckpointError(
                    f"needs bytes {start} to {start + num_bytes}, the file ends at {start + done}",
                    file=self.path,
                    tensor=tensor,
                    remedy="It was cut while in use. " + DOWNLOAD_AGAIN,
                )
            done += count
        return data

    def close(self) -> None:
        """Release the handle."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()
