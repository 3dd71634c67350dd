"""Which files of a repository a model needs: weights as safetensors or GGUF, and small ones that describe it.

Pickles and code are never among them. Uses names only, so that the choice is the same for a hub's list and a folder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from moeflow.checkpoint.gguf.file_names import MAX_PARTS, SUFFIX, GGUFNames, gguf_models, whole_name
from moeflow.checkpoint.hub.model_name import ModelName
from moeflow.checkpoint.other_kinds import refuse_other_files
from moeflow.checkpoint.safetensors.folder import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated_repr
from moeflow.core.units import MIB

MAX_SMALL_BYTES: Final = 64 * MIB  # of a file that describes a model; the largest that are known are tokenizers
DEFAULT_TAG: Final = "Q4_K_M"  # of a GGUF file, where a name has none: what most people run

_SMALL_SUFFIXES: Final = (".json", ".jinja", ".txt")
_POOLING: Final = re.compile(r"\d+_\w+/config\.json")  # of sentence-transformers
_QUANTIZATION = re.compile(r"(?:^|[-._])((UD-)?(I?Q\d\w*|(?:MX|NV)FP4\w*|TQ\d\w*|F16|BF16|F32))$", re.IGNORECASE)
_MOST_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class FileChoice:
    """Files by their paths in the repository."""

    weights: tuple[str, ...]  # empty: the names in `index`
    small: tuple[str, ...] = ()
    index: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a GGUF file, or all parts of one, in order."""
        return bool(self.weights) and self.weights[0].endswith(SUFFIX)


def choose_files(name: ModelName, paths: Collection[str]) -> FileChoice:
    """Return which of a repository's files a name means.

    Raises: CheckpointError if there are none of a kind that is read, or the name fits none or several.
    """
    models = gguf_models(paths)
    if not name.file and (SINGLE_FILE in paths or INDEX_FILE in paths or not models):
        refuse_other_files(paths, str(name))
    if not name.file and (SINGLE_FILE in paths or INDEX_FILE in paths):
        small = tuple(sorted(path for path in paths if _is_small(path)))
        return FileChoice((SINGLE_FILE,), small) if SINGLE_FILE in paths else FileChoice((), small, INDEX_FILE)
    if not models:
        raise _no_model(name, paths)
    return FileChoice(_choose_gguf(name, models))


def has_choice(name: ModelName, paths: Collection[str]) -> bool:
    """Return whether there is anything among these files that a name may mean."""
    if not name.file and (SINGLE_FILE in paths or INDEX_FILE in paths):
        return True
    models = gguf_models(paths)
    return bool(_fitting(name.file, models) if name.file else models)


def shards_of(index: Mapping[str, Any], name: ModelName) -> tuple[str, ...]:
    """Return the files that an index of weights names. Raises: CheckpointError if it is damaged."""
    weight_map = index.get("weight_map")
    files = set(weight_map.values()) if isinstance(weight_map, dict) and _are_texts(weight_map.values()) else set()
    if not files or not all(file.endswith(".safetensors") and PurePosixPath(file).name == file for file in files):
        raise CheckpointError(
            f"{name}: its {INDEX_FILE} names {truncated_repr(sorted(files)) if files else 'no files'}, where "
            "files of weights "
            "beside it are expected",
            remedy="Report it to the repository's owner, or choose another one",
        )
    return tuple(sorted(files))


def tag_of(path: str) -> str:
    """Return what tells a GGUF file from others of its repository: its quantization's tag, or its name.

    The tag ends its name, or that of the folder it lies in. A part of a file has the file's.
    """
    whole = PurePosixPath(whole_name(path))
    match = _QUANTIZATION.search(whole.stem) or _QUANTIZATION.search(whole.parent.name)
    return match[1].upper() if match else whole.name


def _choose_gguf(name: ModelName, models: list[GGUFNames]) -> tuple[str, ...]:
    found = _fitting(name.file or DEFAULT_TAG, models)
    if not name.file and not found and len(models) == 1:
        found = models
    if not found:
        there_are = "there are " + ", ".join(sorted({tag_of(model.whole) for model in models})[:_MOST_SHOWN])
        problem = (
            f"has no GGUF file {name.file!r}" if name.file else f"has several GGUF files, none of them {DEFAULT_TAG}"
        )
        raise CheckpointError(f"{name} {problem}: {there_are}", remedy=f"Name one of them, as in {name.repo}:TAG")
    found = _preferred(found)
    if len(found) > 1:
        begins = [model.files[0] for model in found]
        raise CheckpointError(
            f"{name} may mean {' or '.join(begins[:_MOST_SHOWN])}",
            remedy=f"Name the file, as in {name.repo}:{begins[0]}",
        )
    return _all_parts(name, found[0])


def _preferred(models: list[GGUFNames]) -> list[GGUFNames]:
    """Omit incomplete files, and parts of a model that also exists as one file, unless nothing else is left."""
    whole = [model for model in models if not model.missing] or models
    in_one = {model.whole for model in whole if model.whole in model.files}
    return [model for model in whole if model.whole not in in_one or model.whole in model.files]


def _all_parts(name: ModelName, model: GGUFNames) -> tuple[str, ...]:
    num_parts = len(model.files) + len(model.missing)
    if num_parts > MAX_PARTS:
        problem = f"is in {num_parts} parts, where at most {MAX_PARTS} are expected"
    elif model.missing:
        problem = f"is in {num_parts} parts, of which {model.missing[0]} is missing"
    else:
        return model.files
    raise CheckpointError(
        f"{name} {problem}", remedy="Report it to the repository's owner, or choose another file of it"
    )


def _fitting(wanted: str, models: list[GGUFNames]) -> list[GGUFNames]:
    """Return the models of this name or tag; one whose tag only ends like it if there is no other."""
    if wanted.endswith(SUFFIX):
        return [model for model in models if any(_is_called(wanted, path) for path in (model.whole, *model.files))]
    tag = re.compile(rf"(^|[-._]){re.escape(wanted)}$", re.IGNORECASE)
    fitting = [model for model in models if tag.search(PurePosixPath(model.whole).stem)]
    tagged = [model for model in models if tag_of(model.whole) == wanted.upper()]
    return tagged or fitting


def _is_called(wanted: str, path: str) -> bool:
    return wanted in (path, PurePosixPath(path).name)


def _is_small(path: str) -> bool:
    is_at_top = "/" not in path and path.endswith(_SMALL_SUFFIXES)
    return (is_at_top and not path.endswith(".bin.index.json")) or _POOLING.fullmatch(path) is not None


def _are_texts(values: Collection[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _no_model(name: ModelName, paths: Collection[str]) -> CheckpointError:
    if name.file:
        return CheckpointError(
            f"{name} has no GGUF files",
            remedy="Remove the part after the colon for its safetensors, or take another",
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
