"""What GGUF files are called: models in several parts are NAME-00001-of-00005.gguf and so on.

Uses names only, so that files listed by a hub and files in a folder are grouped alike.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from moeflow.checkpoint.file_errors import blame_file

SUFFIX: Final = ".gguf"
MAX_PARTS: Final = 512  # of a model, all open while it loads; known models have a few dozen at most

_PART: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_NO_MODELS: Final = ("mmproj", "imatrix")  # begin GGUF files that are parts of something else


class PartName(msgspec.Struct, frozen=True):
    """What the name of a part says."""

    stem: str  # that all parts have in common, with the folders before it
    number: int  # from 1 on
    count: int

    @property
    def whole(self) -> str:
        """What the model would be called in one file."""
        return self.stem + SUFFIX

    def __str__(self) -> str:
        return f"{self.stem}-{self.number:05}-of-{self.count:05}{SUFFIX}"


class GGUFNames(msgspec.Struct, frozen=True):
    """The files of one model, by their paths."""

    whole: str  # its name as a single file
    files: tuple[str, ...]  # that there are, in order
    missing: tuple[str, ...] = ()


def parse_part_name(path: str) -> PartName | None:
    """Return what a name says of parts; None: it is no part's."""
    match = _PART.fullmatch(path)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return PartName(match["stem"], int(match["number"]), int(match["count"]))


def whole_name(path: str) -> str:
    """Return what a part's model would be called in one file; of another file, its own name."""
    part = parse_part_name(path)
    return path if part is None else part.whole


def is_gguf_model(path: str) -> bool:
    """Return whether a file is a GGUF file of a language model, or a part of one, by its name."""
    return path.endswith(SUFFIX) and not PurePosixPath(path).name.lower().startswith(_NO_MODELS)


def gguf_models(paths: Collection[str]) -> list[GGUFNames]:
    """Return the GGUF models among some files, by name; of two with the same name that in one file first."""
    found: dict[tuple[str, int], list[str]] = {}
    for path in sorted(filter(is_gguf_model, paths)):
        part = parse_part_name(path)
        found.setdefault((path, 0) if part is None else (part.whole, part.count), []).append(path)
    return [GGUFNames(whole, tuple(files), _missing(files)) for (whole, _), files in sorted(found.items())]


def gguf_start(path: Path) -> Path:
    """Return where the GGUF model begins that a path means: with a part's first, or the only one in a folder.

    Folders with safetensors or with several GGUF models, and other files, are themselves. Raises: CheckpointError if a
    folder cannot be read.
    """
    if not path.is_dir():
        part = parse_part_name(path.name)
        return path if part is None else path.with_name(str(PartName(part.stem, 1, part.count)))
    with blame_file(path):
        names = os.listdir(path)
    models = gguf_models(names)
    if len(models) != 1 or any(name.endswith(".safetensors") for name in names):
        return path
    return gguf_start(path / models[0].files[0])


def start_of(model: str) -> str:
    """Return the same of a path as text, which stays as it is if it is one of its own. Raises: as `gguf_start`."""
    path = Path(model)
    start = gguf_start(path)
    return model if start == path else str(start)


def _missing(files: list[str]) -> tuple[str, ...]:
    part = parse_part_name(files[0])
    if part is None:
        return ()
    names = (str(PartName(part.stem, number, part.count)) for number in range(1, part.count + 1))
    return tuple(sorted(set(names).difference(files)))
