"""The tensors and plain settings of a file that `torch.save` wrote.

Such files are pickles, which can run code. This reads tensors, containers, numbers, texts and `argparse.Namespace`,
and refuses a file with anything else before any of it exists: PyTorch's `weights_only`. NumPy's arrays are skipped,
because a pickle can make NumPy's constructors read any address. Tensors are mapped, not read.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeflow.checkpoint.checkpoint import FLOATS
from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN
from moeflow.checkpoint.regular_file import open_stream
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_ZIP: Final = b"PK\x03\x04"
_LOCK: Final = threading.Lock()  # PyTorch has one list of allowed classes for all threads
_ENUMERATIONS: Final = (  # of Megatron's arguments: read as their numbers
    "megatron.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.enums.PositionEmbeddingType",
    "megatron.model.enums.PositionEmbeddingType",
)
_NOT_NEEDED: Final = (
    "numpy.ndarray",  # of random numbers' states
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "builtins.getattr",  # of enumerations, by Python 3.11.0 to 3.11.3
)
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
        with _data_allowed():
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged or hostile file brings about
        reason = truncated(str(error).split("\n")[0])
        raise CheckpointError(
            f"cannot be read as tensors and settings ({reason})", file=file, remedy=_REMEDY
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise CheckpointError("holds no dictionary by name", file=file, remedy=_REMEDY)
    return found


def plain_floats(value: Any, name: str, file: Path) -> Tensor:
    """Return a value of such a file that is a tensor of floats. Raises: CheckpointError for any other value."""
    if not (isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"):
        raise CheckpointError("is no plain tensor", file=file, tensor=name, remedy=DOWNLOAD_AGAIN)
    if (dtype := stored_as(value)) not in FLOATS:
        raise CheckpointError(
            f"is stored in {dtype}; supported are {', '.join(FLOATS)}", file=file, tensor=name, remedy=DOWNLOAD_AGAIN
        )
    return value


def plain_settings(found: Any) -> Mapping[str, Any] | None:
    """Return the settings of a namespace or a dictionary by name; None for any other value.

    Only numbers, texts and None are kept. Other values, whose comparison or `repr` may fail, give way to their class.
    """
    settings = vars(found) if isinstance(found, argparse.Namespace) else found
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        return None
    return {name: plain_setting(value) for name, value in settings.items()}


def plain_setting(value: Any) -> Any:
    """Return a number, a text or None unchanged, and the class of any other value."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value)


def stored_as(tensor: Tensor) -> str:
    """Return the name of a tensor's type."""
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def _data_allowed() -> Iterator[None]:
    """Have PyTorch read some classes of data meanwhile. Blocks: while another thread reads a file."""
    with _LOCK:
        missing = set(_data_classes()).difference(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals([*missing]):
            yield


class _Skipped:
    """Stands for a value that is not needed, and ignores its contents."""

    def __init__(self, *contents: object) -> None:
        pass

    def __setstate__(self, contents: object) -> None:
        pass


def _data_classes() -> Iterator[Any]:
    """Yield classes without effects that training states contain, some with the name that a file has for them."""
    yield argparse.Namespace
    yield from ((_Skipped, name) for name in _NOT_NEEDED)
    yield from ((int, name) for name in _ENUMERATIONS)
