"""The files behind `/v1/files`: contents beside a description each, in a folder that outlives the server.

A file exists once its description is there, so that an upload that was cut off leaves nothing but a content that
the next start removes. Files that are needed it leaves alone: a job was about to describe them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from moeflow.core.durable import sync
from moeflow.server.jobs.atomic_file import new_id, read_all, write_json


class StoredFile(msgspec.Struct, kw_only=True):
    """A file's description, in OpenAI's words."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str = "processed"


class FileStore:
    """All files of one data folder, by id. `clock` gives unix seconds; one that `is_needed` is not removed."""

    def __init__(self, folder: Path, clock: Callable[[], float], is_needed: Callable[[str], bool]) -> None:
        """Take in what is there.

        Raises: OSError.
        """
        self._folder = folder
        self._clock = clock
        self._is_needed = is_needed
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {file.id: file for file in read_all(folder, StoredFile)}
        for path in folder.iterdir():
            if path.suffix != ".json" and path.name not in self._files and not is_needed(path.name):
                path.unlink()

    def path(self, file_id: str) -> Path:
        """Return where a file's contents are."""
        return self._folder / file_id

    def find(self, file_id: str) -> StoredFile | None:
        """Return a file that has not expired."""
        self._expire()
        return self._files.get(file_id)

    def all(self) -> list[StoredFile]:
        """Return all files, newest first."""
        self._expire()
        return sorted(self._files.values(), key=lambda file: (file.created_at, file.id), reverse=True)

    def place(self) -> Path:
        """Return where to write the contents of a file to be; `add` it then, or remove it."""
        return self.path(new_id("file-", self._clock()))

    def add(self, path: Path, filename: str, purpose: str, lifetime_s: int | None) -> StoredFile:
        """Take in contents that were written to a `place`; if that fails, they are removed.

        Blocks: on the disk.
        Raises: OSError.
        """
        try:
            sync(path)
            return self._describe(path.name, filename, purpose, lifetime_s)
        except BaseException:
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise

    def adopt(self, source: Path, file_id: str, filename: str, purpose: str, lifetime_s: int | None) -> StoredFile:
        """Move a finished file in under a given id. Again, after a crash in between, is harmless.

        Blocks: on the disk.
        Raises: OSError.
        """
        if source.exists():
            source.replace(self.path(file_id))
            sync(source.parent)
        return self._files.get(file_id) or self._describe(file_id, filename, purpose, lifetime_s)

    def delete(self, file_id: str) -> None:
        """Remove a file.

        Raises: OSError.
        """
        del self._files[file_id]
        self.path(file_id).with_suffix(".json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def _describe(self, file_id: str, filename: str, purpose: str, lifetime_s: int | None) -> StoredFile:
        now = int(self._clock())
        file = StoredFile(
            id=file_id,
            bytes=self.path(file_id).stat().st_size,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
            filename=filename,
            purpose=purpose,
        )
        write_json(self.path(file_id).with_suffix(".json"), file)
        self._files[file_id] = file
        return file

    def _expire(self) -> None:
        now = self._clock()
        for file in list(self._files.values()):
            if file.expires_at is not None and file.expires_at <= now and not self._is_needed(file.id):
                self.delete(file.id)
