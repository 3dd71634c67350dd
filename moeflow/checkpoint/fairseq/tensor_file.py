"""The tensors and plain settings of a file that `torch.save` wrote.

Such files are pickles, which can run code. This reads tensors, containers, numbers, texts and `argparse.Namespace`, and
refuses a file with anything else before any of it exists: PyTorch's `weights_only`. Tensors are mapped, not read.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.regular_file import open_stream
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated
from moeflow.kernels.on_demand import torch

_ZIP: Final = b"PK\x03\x04"
_LOCK: Final = threading.Lock()  # PyTorch has one list of allowed classes for all threads
_REMEDY: Final = (
    "Download it again; or where you trust it, load it with torch.load(FILE, weights_only=False), take its tensors and "
    "settings as plain dictionaries, and write these with torch.save"
)


def read_tensor_file(file: Path) -> Mapping[str, Any]:
    """Return what a file holds, a dictionary by name.

    Raises: CheckpointError if it holds anything but data, is of the form before PyTorch 1.6, or is damaged.
    """
    with open_stream(file) as stream:
        if stream.read(len(_ZIP)) != _ZIP:
            raise CheckpointError("is no file that torch.save writes since PyTorch 1.6", file=file, remedy=_REMEDY)
    try:
        with _namespace_allowed():
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged or hostile file brings about
        reason = truncated(str(error).split("\n")[0])
        raise CheckpointError(
            f"cannot be read as tensors and settings ({reason})", file=file, remedy=_REMEDY
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise CheckpointError("holds no dictionary by name", file=file, remedy=_REMEDY)
    return found


@contextmanager
def _namespace_allowed() -> Iterator[None]:
    """Have PyTorch read `argparse.Namespace` meanwhile. Blocks: while another thread reads a file."""
    with _LOCK:
        missing = {argparse.Namespace}.difference(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals([*missing]):
            yield
