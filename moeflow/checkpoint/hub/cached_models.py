"""Lists the models in the hub's cache, downloaded by any tool, and deletes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from moeflow.checkpoint.gguf.file_names import GGUFNames, gguf_models
from moeflow.checkpoint.hub.cache_layout import commit_of, repositories, repository_folder, snapshots
from moeflow.checkpoint.hub.file_choice import tag_of
from moeflow.checkpoint.hub.local_models import find_in_snapshot, find_model, snapshot_files
from moeflow.checkpoint.hub.model_name import MAIN, ModelName
from moeflow.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A downloaded model: a complete folder of safetensors, or a GGUF file, perhaps with missing parts."""

    name: ModelName
    path: Path  # of several parts, the first one's
    files: tuple[Path, ...]  # links to its bytes

    @property
    def num_bytes(self) -> int:
        """What its files take."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def last_used_s(self) -> float:
        """When one of its files was last read, in seconds since the epoch, as exactly as the file system keeps it."""
        return max(max(file.stat().st_atime, file.stat().st_mtime) for file in self.files)


def cached_models(cache: Path) -> list[CachedModel]:
    """Return the models in the hub's cache that are there whole, by name; repositories of other things are left out."""
    return [
        model
        for repo, folder in repositories(cache)
        for snapshot in snapshots(folder)
        for model in _models_in(repo, folder, snapshot)
    ]


def unfinished_bytes(cache: Path) -> dict[str, int]:
    """Return how many bytes of each repository have arrived that no model shows yet: halves, and files not linked."""
    found = {repo: sum(_size(file) for file in _unlinked(folder)) for repo, folder in repositories(cache)}
    return {repo: num_bytes for repo, num_bytes in found.items() if num_bytes}


@dataclass(frozen=True, slots=True)
class Removal:
    """Files to delete: models, or all of a repository with its incomplete files."""

    models: tuple[CachedModel, ...]
    folder: Path
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """What becomes free, as far as no other model has the same files."""
        if self.is_whole:
            return sum(_size(file) for part in ("blobs", "snapshots") for file in _files(self.folder / part))
        own = [file for model in self.models for file in model.files if not file.is_symlink()]
        return sum(_size(file) for file in (*own, *self._orphans()))

    def run(self) -> None:
        """Delete links first: after an interruption, no link lacks its bytes."""
        if self.is_whole:
            _delete_repository(self.folder)
            return
        orphans = self._orphans()
        for model in self.models:
            for file in model.files:
                file.unlink()
        for blob in orphans:
            blob.unlink(missing_ok=True)
        self._forget_empty_snapshots()

    def _forget_empty_snapshots(self) -> None:
        there = snapshots(self.folder)
        empty = [snapshot for snapshot in there if not snapshot_files(snapshot)]
        for snapshot in empty:
            for ref in _refs(self.folder):
                if commit_of(ref, self.folder) == snapshot.name:
                    (self.folder / "refs" / ref).unlink()
            shutil.rmtree(snapshot)
        if there == empty and not _files(self.folder / "blobs"):  # else a pull may be under way
            _delete_repository(self.folder)

    def _orphans(self) -> set[Path]:
        """Return the blobs that nothing links to once the models are gone."""
        leaving = {file for model in self.models for file in model.files if file.is_symlink()}
        return _linked(leaving, self.folder) - _linked(_links(self.folder) - leaving, self.folder)


def plan_removal(name: ModelName, cache: Path) -> Removal:
    """Return the files that `name` refers to: a GGUF file or a revision if it names one, else all downloaded files of
    its repository.

    Raises: CheckpointError if nothing of it is downloaded.
    """
    folder = repository_folder(name.repo, cache)
    has_revision = name.revision != MAIN or name.names_main
    models = tuple(model for model in cached_models(cache) if model.name.repo == name.repo)
    if not name.file and not has_revision and folder.is_dir():
        return Removal(models, folder, is_whole=True)
    if has_revision:
        snapshot = folder / "snapshots" / (commit_of(name.revision, folder) or "none")
        models = tuple(model for model in models if model.path.is_relative_to(snapshot))
    if name.file:
        names = (name, replace(name, file=name.file.upper()))  # as tags are listed
        listed = tuple(model for model in models if model.name in names)
        path = None if listed else find_model(name, cache)
        models = listed or tuple(model for model in models if model.path == path)
    if not models:
        raise CheckpointError(f"{name} is not downloaded", remedy="`moeflow list` shows the downloaded models")
    return Removal(models, folder, is_whole=False)


def _delete_repository(folder: Path) -> None:
    """Delete a repository's folder; of one that is a link, what the cache has in the folder behind it, and the link."""
    for part in ("refs", "snapshots", "blobs", ".no_exist"):
        if (folder / part).is_dir() and not (folder / part).is_symlink():
            shutil.rmtree(folder / part)
    if not folder.is_symlink():
        shutil.rmtree(folder)
        return
    with suppress(OSError):  # something else lies there, which stays
        folder.resolve().rmdir()
    folder.unlink()


def _models_in(repo: str, folder: Path, snapshot: Path) -> Iterator[CachedModel]:
    revision = _revision_of(snapshot.name, folder)
    files = snapshot_files(snapshot)
    ggufs = gguf_models(files)
    if ".safetensors" in {Path(file).suffix for file in files} and _is_whole(ModelName(repo, revision), snapshot):
        others = files.difference(*(model.files for model in ggufs))
        yield CachedModel(ModelName(repo, revision), snapshot, tuple(snapshot / file for file in sorted(others)))
    for model, name in zip(ggufs, _names_of(ggufs), strict=True):
        parts = tuple(snapshot / file for file in model.files)
        yield CachedModel(ModelName(repo, revision, name), parts[0], parts)


def _names_of(models: list[GGUFNames]) -> Iterator[str]:
    """Yield what tells each GGUF model from the others of a snapshot: the first of these that no other has."""
    kinds = [[tag_of(it.whole), Path(it.whole).name, it.whole, it.files[0]] for it in models]
    for names in kinds:
        yield next(name for kind, name in enumerate(names) if [other[kind] for other in kinds].count(name) == 1)


def _is_whole(name: ModelName, snapshot: Path) -> bool:
    try:
        return find_in_snapshot(name, snapshot) == snapshot
    except CheckpointError:
        return False


def _revision_of(commit: str, folder: Path) -> str:
    """Return the branch that is at a commit, `main` before others; else the commit."""
    fitting = [ref for ref in _refs(folder) if commit_of(ref, folder) == commit]
    return MAIN if MAIN in fitting else next(iter(fitting), commit)


def _refs(folder: Path) -> list[str]:
    return sorted(it.relative_to(folder / "refs").as_posix() for it in (folder / "refs").rglob("*") if it.is_file())


def _unlinked(folder: Path) -> set[Path]:
    return set(_files(folder / "blobs")) - _linked(_links(folder), folder)


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder that have bytes of their own; hidden ones are of file managers."""
    found = (Path(inner, file) for inner, _, files in os.walk(folder) for file in files if not file.startswith("."))
    return [file for file in found if not file.is_symlink()]


def _links(folder: Path) -> set[Path]:
    """Return the links in a repository's snapshots."""
    found = (Path(inner, file) for inner, _, files in os.walk(folder / "snapshots") for file in files)
    return {file for file in found if file.is_symlink()}


def _linked(links: Collection[Path], folder: Path) -> set[Path]:
    """Return the blobs that links lead to. Some lead out of the cache, to files that are not ours."""
    blobs = os.path.realpath(folder / "blobs")
    targets = (link.parent / os.readlink(link) for link in links)
    return {folder / "blobs" / target.name for target in targets if os.path.realpath(target.parent) == blobs}


def _size(file: Path) -> int:
    return file.stat().st_size
