"""Which files of a repository a model needs: weights as safetensors or one GGUF file, and small ones that describe it.

Pickles and code are never among them. Knows names of files only, so that what a hub lists and what lies in a folder are
chosen from alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from moeflow.checkpoint.hub.model_name import ModelName
from moeflow.checkpoint.safetensors.folder import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE
from moeflow.core.brief import brief
from moeflow.core.errors import CheckpointError
from moeflow.core.units import MIB

MAX_SMALL_BYTES: Final = 64 * MIB  # of a file that describes a model; the largest that are known are tokenizers
DEFAULT_TAG: Final = "Q4_K_M"  # of a GGUF file, where a name has none: what most people run

_SMALL_SUFFIXES: Final = (".json", ".jinja", ".txt")
_POOLING: Final = re.compile(r"\d+_\w+/config\.json")  # of sentence-transformers
_SUFFIX: Final = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # ends the name of a GGUF file that was split, without its suffix
_QUANTIZATION = re.compile(r"[-._]((UD-)?(I?Q\d\w*|MXFP4\w*|TQ\d\w*|F16|BF16|F32))$", re.IGNORECASE)
_NO_MODELS: Final = ("mmproj", "imatrix")  # begin GGUF files that are parts of something else
_MOST_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class FileChoice:
    """Files by their paths in the repository."""

    weights: tuple[str, ...]  # empty: those that `index` names
    small: tuple[str, ...] = ()
    index: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether the model is one GGUF file."""
        return len(self.weights) == 1 and self.weights[0].endswith(_SUFFIX)


def choose_files(name: ModelName, paths: Collection[str]) -> FileChoice:
    """Return which of a repository's files a name means.

    Raises: CheckpointError if there are none of a kind that is read, or the name fits none or several.
    """
    if not name.file and (SINGLE_FILE in paths or INDEX_FILE in paths):
        small = tuple(sorted(path for path in paths if _is_small(path)))
        return FileChoice((SINGLE_FILE,), small) if SINGLE_FILE in paths else FileChoice((), small, INDEX_FILE)
    models = sorted(path for path in paths if is_gguf_model(path))
    if not models:
        raise _no_model(name, paths)
    return FileChoice((_choose_gguf(name, models),))


def has_choice(name: ModelName, paths: Collection[str]) -> bool:
    """Return whether there is anything among these files that a name may mean."""
    if not name.file and (SINGLE_FILE in paths or INDEX_FILE in paths):
        return True
    models = {whole_of(path) for path in paths if is_gguf_model(path)}
    return bool(_fitting(name.file, list(models)) if name.file else models)


def shards_of(index: Mapping[str, Any], name: ModelName) -> tuple[str, ...]:
    """Return the files that an index of weights names. Raises: CheckpointError if it is damaged."""
    weight_map = index.get("weight_map")
    files = set(weight_map.values()) if isinstance(weight_map, dict) and _are_texts(weight_map.values()) else set()
    if not files or not all(file.endswith(".safetensors") and PurePosixPath(file).name == file for file in files):
        raise CheckpointError(
            f"{name}: its {INDEX_FILE} names {brief(sorted(files)) if files else 'no files'}, where files of weights "
            "beside it are expected",
            remedy="Tell whoever made the repository, or take another one",
        )
    return tuple(sorted(files))


def is_gguf_model(path: str) -> bool:
    """Return whether a file is a GGUF file of a language model, by its name."""
    return path.endswith(_SUFFIX) and not PurePosixPath(path).name.lower().startswith(_NO_MODELS)


def tag_of(path: str) -> str:
    """Return what tells a GGUF file from others of its repository: its quantization's tag, or its name."""
    match = _QUANTIZATION.search(_stem(path))
    return match[1].upper() if match else PurePosixPath(path).name


def _choose_gguf(name: ModelName, models: list[str]) -> str:
    wholes: dict[str, list[str]] = {}
    for path in models:
        wholes.setdefault(whole_of(path), []).append(path)
    found = _fitting(name.file or DEFAULT_TAG, list(wholes))
    if not name.file and not found and len(wholes) == 1:
        found = list(wholes)
    there_are = "there are " + ", ".join(sorted({tag_of(whole) for whole in wholes})[:_MOST_SHOWN])
    if not found:
        problem = (
            f"has no GGUF file {name.file!r}" if name.file else f"has several GGUF files, none of them {DEFAULT_TAG}"
        )
        raise CheckpointError(f"{name} {problem}: {there_are}", remedy=f"Name one of them, as in {name.repo}:TAG")
    if len(found) > 1:
        raise CheckpointError(
            f"{name} may mean {' or '.join(found[:_MOST_SHOWN])}", remedy=f"Name the file, as in {name.repo}:{found[0]}"
        )
    parts = wholes[found[0]]
    if parts != found:
        raise CheckpointError(
            f"{name} is split over {len(parts)} files, and only whole GGUF files are read; {there_are}",
            remedy="Take a whole one, or fetch its parts and join them: llama-gguf-split --merge FIRST_PART WHOLE_FILE",
        )
    return found[0]


def whole_of(path: str) -> str:
    """Return the name of the file that a part of a split GGUF file belongs to; of another file, its own."""
    return _PART.sub("", path.removesuffix(_SUFFIX)) + _SUFFIX


def _stem(path: str) -> str:
    return PurePosixPath(path).name.removesuffix(_SUFFIX)


def _fitting(wanted: str, wholes: list[str]) -> list[str]:
    """Return the files of this name or tag; one whose tag only ends like it if there is no other."""
    if wanted.endswith(_SUFFIX):
        return [path for path in wholes if wanted in (path, PurePosixPath(path).name)]
    tag = re.compile(rf"(^|[-._]){re.escape(wanted)}$", re.IGNORECASE)
    fitting = [path for path in wholes if tag.search(_stem(path))]
    return [path for path in fitting if tag_of(path) == wanted.upper()] or fitting


def _is_small(path: str) -> bool:
    is_at_top = "/" not in path and path.endswith(_SMALL_SUFFIXES)
    return (is_at_top and not path.endswith(".bin.index.json")) or _POOLING.fullmatch(path) is not None


def _are_texts(values: Collection[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _no_model(name: ModelName, paths: Collection[str]) -> CheckpointError:
    if name.file:
        return CheckpointError(
            f"{name} has no GGUF files",
            remedy="Leave the part behind the colon away for its safetensors, or take another",
        )
    pickles = sorted(path for path in paths if PurePosixPath(path).suffix in PICKLE_SUFFIXES)
    if pickles:
        return CheckpointError(
            f"{name} has its weights as pickles only ({pickles[0]}), which can run code and are not fetched",
            remedy="Look for the model as safetensors or GGUF: many are in another repository, or in a branch of it",
        )
    return CheckpointError(
        f"{name} has neither safetensors ({SINGLE_FILE} or {INDEX_FILE}) nor GGUF files",
        remedy="Take a repository with a language model's weights",
    )
