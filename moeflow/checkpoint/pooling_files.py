"""How a checkpoint's hidden states become vectors, by the files of sentence-transformers next to it.

`modules.json` lists what a text passes through; the folder of the pooling module has a `config.json` with one field a
kind. A checkpoint without these files was made to generate.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any, Final

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN
from moeflow.checkpoint.json_file import read_json_list, read_json_object
from moeflow.core.errors import CheckpointError
from moeflow.core.pooling_params import POOLING_KINDS, PoolingKind, PoolingParams
from moeflow.core.truncated_repr import truncated_repr

_CHOOSE: Final = "Choose a pooling that there is: " + ", ".join(POOLING_KINDS)
_KINDS: Final[dict[str, PoolingKind]] = {  # by the field of a pooling module's configuration
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
_MODES: Final[dict[str, PoolingKind]] = {"lasttoken": "last", "mean": "mean", "cls": "first"}  # likewise, newer files


def read_pooling(path: Path) -> PoolingParams | None:
    """Return how a checkpoint's vectors are made; None: its files do not say.

    Raises: CheckpointError if its files cannot be read, or ask for something else than there is.
    """
    file = path / "modules.json"
    if not os.path.lexists(file):
        return None
    modules = [(_class_name(module, file), module) for module in read_json_list(file)]
    names = [name for name, _ in modules]
    if names[1:] not in (["Pooling"], ["Pooling", "Normalize"]):
        raise CheckpointError(
            f"lists the modules {truncated_repr(names)}, but only pooling and normalising can follow the model here",
            file=file,
            remedy=_CHOOSE,
        )
    return PoolingParams(kind=_read_kind(path / _folder(modules[1][1], file)), normalize="Normalize" in names)


def _class_name(module: Any, file: Path) -> str:
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise CheckpointError(f"lists {truncated_repr(module)}, which is no module", file=file, remedy=DOWNLOAD_AGAIN)
    name: str = module["type"].rpartition(".")[2]
    return name


def _folder(module: dict[str, Any], file: Path) -> str:
    name = module.get("path")
    if not isinstance(name, str) or name in ("", "..") or PurePosixPath(name).name != name:
        raise CheckpointError(
            f"has its pooling in {truncated_repr(name)}, which is no folder next to it",
            file=file,
            remedy=DOWNLOAD_AGAIN,
        )
    return name


def _read_kind(folder: Path) -> PoolingKind:
    file = folder / "config.json"
    config = read_json_object(file)
    asked = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    found = _MODES.get(str(config["pooling_mode"])) if "pooling_mode" in config else None
    if len(asked) == 1 and found is None:
        found = _KINDS.get(asked[0])
    if found is None or len(asked) > 1:
        raise CheckpointError(
            f"asks for the pooling {truncated_repr(config.get('pooling_mode', asked))}, which is not supported",
            file=file,
            remedy=_CHOOSE,
        )
    return found
