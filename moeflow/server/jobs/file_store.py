"""The files behind `/v1/files`: contents beside a description each, in a folder that outlives the server.

A file exists once its description exists. An interrupted upload leaves only contents that the next start removes. Files
that are needed it leaves alone: a job was about to describe them. If a description is
damaged, the contents are kept under a new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from moeflow.core.durable import sync
from moeflow.core.units import format_bytes
from moeflow.server.api.schema.file import FileObject, Purpose
from moeflow.server.errors import ApiError
from moeflow.server.jobs.atomic_file import DAMAGED, new_id, read_all, write_json
from moeflow.server.jobs.job_clock import JobClock

HIDDEN_S: Final = 3600.0  # from the expiry of a file, as this server saw it, to the deletion of its contents


class IncomingFile:
    """An upload: where to write it, and whom to ask before each piece is written."""

    def __init__(self, store: FileStore, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._store = store

    def check_room(self, num_bytes: int) -> None:
        """Look ahead. Raises: ApiError 413 if so many more bytes exceed the quota."""
        self._store.check_room(self, num_bytes)

    def count(self, num_bytes: int) -> None:
        """Count a piece. Raises: ApiError 413 if it exceeds the quota."""
        self._store.check_room(self, num_bytes)
        self.num_bytes += num_bytes


class FileStore:
    """All files of one data folder, by id. One that `is_needed` is not removed.

    An expired file is hidden. Its contents are deleted an hour later, or as soon as an upload needs the space. If the
    server started with a wrong clock, the file is visible again under the right one.

    Uploads are refused if the total of all files, running uploads and `result_bytes` of unfinished jobs would exceed
    `quota_bytes`. Results are counted but never refused: the work is done. Uploads are counted piece by piece in the
    event loop, so that no two use the same quota.
    """

    def __init__(
        self,
        folder: Path,
        clock: JobClock,
        *,
        is_needed: Callable[[str], bool],
        result_bytes: Callable[[], int],
        quota_bytes: int,
    ) -> None:
        """Load the stored files. Raises: OSError."""
        self._folder = folder
        self._clock = clock
        self._is_needed = is_needed
        self._result_bytes = result_bytes
        self._quota_bytes = quota_bytes
        self._hidden_since_s: dict[str, float] = {}  # expired files, by the clock's uptime
        self._incoming: set[IncomingFile] = set()
        self._kept_bytes = 0  # of all other files, when an upload last began or ended
        folder.mkdir(mode=0o700, exist_ok=True)
        self._files, damaged = read_all(folder, FileObject, lambda file: file.id)
        for file_id in damaged:
            if self.path(file_id).exists():
                self._describe(file_id, file_id, "batch_output" if file_id.count("-") > 1 else "batch", None)
        for path in folder.iterdir():
            if path.suffix not in (".json", DAMAGED) and path.name not in self._files and not is_needed(path.name):
                path.unlink()

    def path(self, file_id: str) -> Path:
        """Return where a file's contents are."""
        return self._folder / file_id

    def find(self, file_id: str) -> FileObject | None:
        """Return a file that has not expired."""
        self._hide_expired()
        return None if file_id in self._hidden_since_s else self._files.get(file_id)

    def all(self) -> list[FileObject]:
        """Return all files, newest first."""
        self._hide_expired()
        shown = [file for file in self._files.values() if file.id not in self._hidden_since_s]
        return sorted(shown, key=lambda file: (file.created_at, file.id), reverse=True)

    @contextlib.contextmanager
    def incoming(self) -> Iterator[IncomingFile]:
        """Begin an upload: write it to its path, then `add` it. Contents not added by the end of the block are removed.

        Raises: OSError.
        """
        file = IncomingFile(self, self.path(new_id("file-", self._clock.now())))
        self._kept_bytes = self._count_kept()
        self._incoming.add(file)
        try:
            yield file
        finally:
            self._incoming.remove(file)
            self._kept_bytes = self._count_kept()
            if file.path.name not in self._files:
                file.path.with_suffix(".json").unlink(missing_ok=True)
                file.path.unlink(missing_ok=True)

    def check_room(self, upload: IncomingFile, num_bytes: int) -> None:
        """See whether so many more bytes of an upload may come. Raises: ApiError 413."""
        wanted = upload.num_bytes + num_bytes
        if self._taken_beside(upload) + wanted > self._quota_bytes:
            self._delete_expired()
        taken = self._taken_beside(upload)
        if taken + wanted > self._quota_bytes:
            quota, have = format_bytes(self._quota_bytes), format_bytes(taken)
            message = f"all files together may have {quota} here, and have {have}: delete files that are not needed"
            raise ApiError(413, "file_quota_exceeded", message)

    def add(self, file: IncomingFile, filename: str, purpose: Purpose, lifetime_s: int | None) -> FileObject:
        """Take in an upload that is complete.

        Blocks: on the disk.
        Raises: OSError.
        """
        sync(file.path)
        return self._describe(file.path.name, filename, purpose, lifetime_s)

    def adopt(self, source: Path, file_id: str, filename: str, purpose: Purpose, lifetime_s: int | None) -> FileObject:
        """Move a finished file in under a given id. Again, after a crash in between, is harmless.

        Blocks: on the disk.
        Raises: OSError.
        """
        if source.exists():
            source.replace(self.path(file_id))
            sync(source.parent)
        return self._files.get(file_id) or self._describe(file_id, filename, purpose, lifetime_s)

    def delete(self, file_id: str) -> None:
        """Remove a file. Raises: OSError."""
        del self._files[file_id]
        self._hidden_since_s.pop(file_id, None)
        for suffix in (".json", DAMAGED, ""):
            self.path(file_id).with_suffix(suffix).unlink(missing_ok=True)

    def _describe(self, file_id: str, filename: str, purpose: Purpose, lifetime_s: int | None) -> FileObject:
        now = int(self._clock.now())
        file = FileObject(
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

    def _hide_expired(self) -> None:
        """Hide expired files, and delete files that were hidden for long enough."""
        now, uptime_s = self._clock.certain(), self._clock.uptime_s()
        for file in list(self._files.values()):
            if file.expires_at is None or file.expires_at > now or self._is_needed(file.id):
                self._hidden_since_s.pop(file.id, None)
            elif uptime_s - self._hidden_since_s.setdefault(file.id, uptime_s) >= HIDDEN_S:
                self.delete(file.id)

    def _delete_expired(self) -> None:
        self._hide_expired()
        for file_id in list(self._hidden_since_s):
            self.delete(file_id)
        self._kept_bytes = self._count_kept()

    def _taken_beside(self, upload: IncomingFile) -> int:
        """Return the bytes of all files but one upload."""
        return self._kept_bytes + sum(file.num_bytes for file in self._incoming if file is not upload)

    def _count_kept(self) -> int:
        """Return the bytes of all files but uploads on their way."""
        return sum(file.bytes for file in list(self._files.values())) + self._result_bytes()
