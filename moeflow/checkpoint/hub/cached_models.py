"""What models lie in the hub's cache, whichever tool fetched them, and how to be rid of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moeflow.checkpoint.hub.blob_download import PARTIAL
from moeflow.checkpoint.hub.cache_layout import commit_of, repositories, repository_folder
from moeflow.checkpoint.hub.file_choice import is_gguf_model, tag_of
from moeflow.checkpoint.hub.local_models import find_in_snapshot, find_model, snapshot_files
from moeflow.checkpoint.hub.model_name import MAIN, ModelName
from moeflow.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that is here, all of it: a folder of safetensors, or a GGUF file."""

    name: ModelName
    path: Path
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
        for snapshot in sorted((folder / "snapshots").glob("*"))
        for model in _models_in(repo, folder, snapshot)
    ]


def unfinished_bytes(cache: Path) -> dict[str, int]:
    """Return how many bytes of each repository have arrived that no whole file has yet."""
    found = {repo: sum(_size(file) for file in _partials(folder)) for repo, folder in repositories(cache)}
    return {repo: num_bytes for repo, num_bytes in found.items() if num_bytes}


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be deleted: models, or all of a repository, with what has not arrived whole."""

    models: tuple[CachedModel, ...]
    folder: Path
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """What becomes free, as far as no other model has the same files."""
        if self.is_whole:
            return sum(_size(file) for file in (self.folder / "blobs").glob("*"))
        return sum(_size(blob) for blob in self._orphans())

    def run(self) -> None:
        """Delete it, links first: what is interrupted leaves no link without its bytes."""
        if self.is_whole:
            for part in ("refs", "snapshots"):
                shutil.rmtree(self.folder / part, ignore_errors=True)
            shutil.rmtree(self.folder)
            return
        orphans = self._orphans()
        for model in self.models:
            for file in model.files:
                file.unlink()
        for blob in orphans:
            blob.unlink(missing_ok=True)
        self._forget_empty_snapshots()

    def _forget_empty_snapshots(self) -> None:
        snapshots = list((self.folder / "snapshots").glob("*"))
        empty = [snapshot for snapshot in snapshots if not snapshot_files(snapshot)]
        for snapshot in empty:
            for ref in _refs(self.folder):
                if commit_of(ref, self.folder) == snapshot.name:
                    (self.folder / "refs" / ref).unlink()
            shutil.rmtree(snapshot)
        if snapshots == empty and not any(_partials(self.folder)):
            shutil.rmtree(self.folder)

    def _orphans(self) -> set[Path]:
        """Return the blobs that nothing links to once the models are gone."""
        leaving = {file for model in self.models for file in model.files}
        links = {
            Path(folder, file)
            for folder, _, files in os.walk(self.folder / "snapshots")
            for file in files
            if Path(folder, file).is_symlink()
        }
        kept = {self._blob(link) for link in links - leaving}
        return {blob for link in links & leaving if (blob := self._blob(link)) is not None} - kept

    def _blob(self, link: Path) -> Path | None:
        """Return the blob that a link leads to; None: it leads out of the cache, to a file that is not ours."""
        target = link.parent / os.readlink(link)
        blobs = os.path.realpath(self.folder / "blobs")
        return Path(blobs, target.name) if os.path.realpath(target.parent) == blobs else None


def plan_removal(name: ModelName, cache: Path) -> Removal:
    """Return what `name` means: a GGUF file or a revision, if it says so, else all of its repository that is here.

    Raises: CheckpointError if nothing of it is here.
    """
    folder = repository_folder(name.repo, cache)
    if not name.file and name.revision == MAIN and folder.is_dir():
        models = tuple(model for model in cached_models(cache) if model.name.repo == name.repo)
        return Removal(models, folder, is_whole=True)
    path = find_model(name, cache)
    models = tuple(model for model in cached_models(cache) if model.path == path)
    if not models:
        raise CheckpointError(f"{name} is not here", remedy="`moeflow list` says what is")
    return Removal(models, folder, is_whole=False)


def _models_in(repo: str, folder: Path, snapshot: Path) -> Iterator[CachedModel]:
    revision = _revision_of(snapshot.name, folder)
    files = snapshot_files(snapshot)
    ggufs = sorted(file for file in files if is_gguf_model(file))
    if ".safetensors" in {Path(file).suffix for file in files} and _is_whole(ModelName(repo, revision), snapshot):
        yield CachedModel(
            ModelName(repo, revision), snapshot, tuple(snapshot / file for file in sorted(files - set(ggufs)))
        )
    tags = [tag_of(file) for file in ggufs]
    for file, tag in zip(ggufs, tags, strict=True):
        part = tag if tags.count(tag) == 1 else Path(file).name
        yield CachedModel(ModelName(repo, revision, part), snapshot / file, (snapshot / file,))


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


def _partials(folder: Path) -> Iterator[Path]:
    return (folder / "blobs").glob(f"*{PARTIAL}")


def _size(file: Path) -> int:
    return file.stat().st_size
