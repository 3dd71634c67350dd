"""Brings a model from a hub to this machine.

It chooses the files, checks the free space, downloads several files concurrently, and links the snapshot at the end. So
a model is in the cache completely or not at all.
"""

from __future__ import annotations

import functools
import os
import queue
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Final

from moeflow.checkpoint.hub.blob_download import PARTIAL, fetch_blob, has_blob
from moeflow.checkpoint.hub.cache_layout import COMMIT, repository_folder
from moeflow.checkpoint.hub.file_choice import MAX_SMALL_BYTES, choose_files, shards_of
from moeflow.checkpoint.hub.local_models import find_in_snapshot
from moeflow.checkpoint.hub.model_name import ModelName
from moeflow.checkpoint.json_file import MAX_INDEX_BYTES, read_json_object
from moeflow.checkpoint.other_kinds import refuse_other_config
from moeflow.core.cache_dir import existing_folder
from moeflow.core.errors import CapacityError, CheckpointError, HubError
from moeflow.core.units import format_bytes
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    from moeflow.checkpoint.hub.hub_client import RemoteFile, Repository

with on_demand(__name__):
    from moeflow.checkpoint.hub import hub_client

_CONFIG: Final = "config.json"
_NUM_CONNECTIONS: Final = 4
_MAX_FILES: Final = 2000  # some times what the largest models have
_LEAVE_S: Final = 0.5  # how long threads get to end when somebody interrupts

OnProgress = Callable[[int, int], None]  # downloaded bytes, total bytes


def pull(name: ModelName, cache: Path, on_progress: OnProgress) -> Path:
    """Have a model in the hub's cache; return its folder or GGUF file.

    Complete files are not downloaded again. Ctrl-C keeps the downloaded bytes for the next time.
    Blocks: on the network. Raises: HubError, CheckpointError if the repository has no readable model, CapacityError if
    the disk is full.
    """
    repository = hub_client.list_repository(name)
    place = _Place(repository, cache)
    files = _needed(repository, place)
    blobs = list({file.checksum: file for file in files}.values())
    _check_room(blobs, place)
    _fetch_all(blobs, place, _Progress(sum(blob.num_bytes for blob in blobs), on_progress))
    for file in files:
        place.link(file)
    place.refer()
    found = find_in_snapshot(name, place.snapshot)
    if found is None:
        raise CheckpointError(
            f"{name} has no config.json beside its weights", remedy="Take a repository in Hugging Face form"
        )
    return found


@dataclass
class _Progress:
    total_bytes: int
    on_progress: OnProgress
    done_bytes: int = 0
    _lock: Lock = field(default_factory=Lock)

    def add(self, num_bytes: int) -> None:
        """Count bytes that have come, from any thread."""
        with self._lock:
            self.done_bytes += num_bytes
            self.on_progress(self.done_bytes, self.total_bytes)


class _Place:
    """Where a repository lies in the hub's cache."""

    def __init__(self, repository: Repository, cache: Path) -> None:
        self.repository = repository
        self.folder = repository_folder(repository.name.repo, cache)
        self.blobs = self.folder / "blobs"
        self.snapshot = self.folder / "snapshots" / repository.commit

    def fetch(self, file: RemoteFile, progress: _Progress, stop: Event) -> None:
        """Have a file's bytes here."""
        fetch_blob(
            file, functools.partial(hub_client.open_at, self.repository, file.path), self.blobs, progress.add, stop
        )

    def fetch_alone(self, file: RemoteFile) -> Path:
        """Have the bytes of a small file here, without telling of progress; return where."""
        self.fetch(file, _Progress(file.num_bytes, lambda *_: None), Event())
        return self.blobs / file.checksum

    def link(self, file: RemoteFile) -> None:
        """Link a downloaded file into the snapshot."""
        link = self.snapshot / file.path
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            depth = len(PurePosixPath(file.path).parts)
            _replace(link, lambda new: new.symlink_to(Path(*[".."] * (depth + 1), "blobs", file.checksum)))

    def refer(self) -> None:
        """Note what commit the revision is."""
        name = self.repository.name
        if COMMIT.fullmatch(name.revision):
            return
        ref = self.folder / "refs" / name.revision
        try:
            ref.parent.mkdir(parents=True, exist_ok=True)
            _replace(ref, lambda new: _write(new, self.repository.commit))
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise CheckpointError(
                f"{name} is downloaded, but cannot be named {ref}: a branch pulled before has part of that name",
                remedy=f"Pull {name.repo}@{self.repository.commit}, or `moeflow rm {name.repo}` and pull again",
            ) from None

    def missing_bytes(self, file: RemoteFile) -> int:
        """Return how many bytes of a file have still to come."""
        partial = self.blobs / (file.checksum + PARTIAL)
        here = partial.stat().st_size if partial.exists() else 0
        return 0 if has_blob(file, self.blobs) else max(file.num_bytes - here, 0)


def _needed(repository: Repository, place: _Place) -> list[RemoteFile]:
    """Return the files to have. The config and an index of weights are fetched, to know which they are.

    Raises: CheckpointError, before weights are fetched, for another kind of model; HubError.
    """
    name, files = repository.name, repository.files
    choice = choose_files(name, files)
    weights = choice.weights
    if choice.index is not None:
        index = files[choice.index]
        _check_small(index, name, MAX_INDEX_BYTES)
        weights = shards_of(read_json_object(place.fetch_alone(index), MAX_INDEX_BYTES), name)
    num_files = len(choice.small) + len(weights)
    if num_files > _MAX_FILES:
        raise HubError(
            f"{name} needs {num_files} files, where a model has {_MAX_FILES} at most. Look at the repository"
        )
    missing = sorted(set(weights) - files.keys())
    if missing:
        raise CheckpointError(
            f"{name} lacks {missing[0]}, which its index names",
            remedy="Report it to the repository's owner, or choose another one",
        )
    small = [files[path] for path in choice.small]
    for file in small:
        _check_small(file, name, MAX_SMALL_BYTES)
        if file.path == _CONFIG:
            refuse_other_config(read_json_object(place.fetch_alone(file)), str(name))
    return [*small, *(files[path] for path in weights)]


def _check_small(file: RemoteFile, name: ModelName, max_bytes: int) -> None:
    if file.num_bytes > max_bytes:
        raise HubError(
            f"{file.path} of {name} has {format_bytes(file.num_bytes)}, where at most {format_bytes(max_bytes)} are "
            "expected of such a file. Look at the repository"
        )


def _check_room(files: list[RemoteFile], place: _Place) -> None:
    need_bytes = sum(place.missing_bytes(file) for file in files)
    free_bytes = shutil.disk_usage(existing_folder(place.folder)).free
    if need_bytes > free_bytes:
        raise CapacityError(
            f"{place.repository.name} needs {format_bytes(need_bytes)} of disk in {place.folder.parent}, where "
            f"{format_bytes(free_bytes)} are free. Delete models (`moeflow list`, `moeflow rm`), name a folder on "
            "another disk (HF_HUB_CACHE), or take a quantization with fewer bits"
        )


def _fetch_all(files: list[RemoteFile], place: _Place, progress: _Progress) -> None:
    """Fetch files, some at a time. The first error ends all, and so does Ctrl-C."""
    waiting: queue.SimpleQueue[RemoteFile | None] = queue.SimpleQueue()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stop = Event()
    for file in files:
        waiting.put(file)
    threads = [
        Thread(target=_work, args=(waiting, ended, place, progress, stop), name=f"pull {number}", daemon=True)
        for number in range(_NUM_CONNECTIONS)
    ]
    for thread in threads:
        waiting.put(None)
        thread.start()
    try:
        for _ in threads:
            if error := ended.get():
                raise error
    finally:
        stop.set()
        for thread in threads:
            thread.join(_LEAVE_S)


def _work(
    waiting: queue.SimpleQueue[RemoteFile | None],
    ended: queue.SimpleQueue[BaseException | None],
    place: _Place,
    progress: _Progress,
    stop: Event,
) -> None:
    try:
        while (file := waiting.get()) is not None:
            place.fetch(file, progress, stop)
    except BaseException as error:
        ended.put(error)
    else:
        ended.put(None)


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    """Make a file or a link under a temporary name first, so that it appears atomically."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        make(new)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="ascii")
