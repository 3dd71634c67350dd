"""Models that were pulled: which paths their names lead to.

They lie where all tools of the hub keep theirs, the hub library's cache, in its layout: what one has fetched, others
find. `HF_HUB_CACHE` and `HF_HOME` place it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from moeflow.checkpoint.gguf.file_names import gguf_models, start_of
from moeflow.checkpoint.hub.cache_layout import commit_of, repository_folder, snapshots
from moeflow.checkpoint.hub.file_choice import choose_files, has_choice, shards_of
from moeflow.checkpoint.hub.model_name import MAIN, ModelName, parse_model_name
from moeflow.checkpoint.json_file import MAX_INDEX_BYTES, read_json_object
from moeflow.core.errors import CheckpointError
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    from huggingface_hub import constants  # reads the environment, as every tool that uses the library does


def hub_cache() -> Path:
    """Return the folder of the hub library's cache."""
    return Path(constants.HF_HUB_CACHE)


def local_path(model: str) -> str:
    """Return the path of a model: the text itself, or where the model of that name lies. What exists goes first.

    Of a GGUF model in several parts it is the first one's. Raises: CheckpointError if it names a model that is missing
    or incomplete.
    """
    if os.path.lexists(model):
        return start_of(model)
    name = parse_model_name(model)
    if name is None:
        return model
    found = find_model(name, hub_cache())
    if found is None:
        raise CheckpointError(
            f"{model} was not found: it is neither a path nor a downloaded model",
            remedy=f"`moeflow pull {model}` downloads it; `moeflow plan {model}` estimates its speed first",
        )
    return str(found)


def find_model(name: ModelName, cache: Path) -> Path | None:
    """Return the folder or the GGUF file of a model in the hub's cache; None: it is not there, or not all of it.

    Raises: CheckpointError if the name fits several GGUF files that are there.
    """
    return next(filter(None, (find_in_snapshot(name, folder) for folder in _snapshots(name, cache))), None)


def find_in_snapshot(name: ModelName, snapshot: Path) -> Path | None:
    """Return the model of that name in a snapshot. Raises: as `find_model`."""
    files = snapshot_files(snapshot)
    files = files.difference(*(model.files for model in gguf_models(files) if model.missing))
    if not has_choice(name, files):
        return None
    choice = choose_files(name, files)
    if choice.is_gguf:
        return snapshot / choice.weights[0]
    weights = choice.weights
    if choice.index is not None:
        weights = shards_of(read_json_object(snapshot / choice.index, MAX_INDEX_BYTES), name)
    return snapshot if files.issuperset((*weights, "config.json")) else None


def snapshot_files(snapshot: Path) -> set[str]:
    """Return the files of a snapshot that are there, by their paths in the repository."""
    found = (Path(folder, file) for folder, _, files in os.walk(snapshot) for file in files)
    return {file.relative_to(snapshot).as_posix() for file in found if file.exists()}


def _snapshots(name: ModelName, cache: Path) -> Iterator[Path]:
    """Yield the snapshots that a name may mean: the revision's, and of `main` older ones, too, the newest first."""
    folder = repository_folder(name.repo, cache)
    commit = commit_of(name.revision, folder)
    if commit is not None:
        yield folder / "snapshots" / commit
    if name.revision == MAIN and folder.is_dir():
        older = [it for it in snapshots(folder) if it.name != commit]
        yield from sorted(older, key=lambda it: it.stat().st_mtime, reverse=True)
