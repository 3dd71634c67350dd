"""The bytes of one file, from a hub into its cache: whole and verified, or to be gone on with.

Downloaded bytes are appended to `CHECKSUM.incomplete`. After an interrupted connection or a crash, the next download
requests the rest. The checksum is computed as bytes arrive. The file gets its name when it is the right one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, BinaryIO, Final

from moeflow.core.durable import sync
from moeflow.core.errors import HubConnectionError, HubError

if TYPE_CHECKING:
    from moeflow.checkpoint.hub.hub_client import OpenAt, RemoteFile

PARTIAL: Final = ".incomplete"  # ends names of files that are not whole, as those of other tools
_MAX_FAILURES: Final = 8  # consecutive attempts without a byte
_FIRST_WAIT_S: Final = 0.25  # after a failure; doubled with each that follows
_MAX_WAIT_S: Final = 30.0
_LOCK_S: Final = 0.5  # how often a file that another process fetches is looked at
_PIECE_BYTES: Final = 1 << 20
_SHA256_DIGITS: Final = 64

OnBytes = Callable[[int], None]  # called with the number of new bytes; negative: bytes to download again


class StoppedError(Exception):
    """The download is cancelled; downloaded bytes are kept."""


def fetch_blob(file: RemoteFile, open_at: OpenAt, blobs: Path, on_bytes: OnBytes, stop: Event) -> None:
    """Have a file's bytes in a folder, under its checksum.

    Blocks: on the network, and while another process fetches the same file.
    Raises: HubError if the hub gives none or wrong ones, OSError of the disk, StoppedError once `stop` is set.
    """
    target = blobs / file.checksum
    if has_blob(file, blobs):
        on_bytes(file.num_bytes)
        return
    blobs.mkdir(parents=True, exist_ok=True)
    partial = blobs / (file.checksum + PARTIAL)
    with _locked(partial, stop) as stream:
        if has_blob(file, blobs):  # by now, from another process
            partial.unlink(missing_ok=True)
            on_bytes(file.num_bytes)
            return
        _Download(file, open_at, stream, on_bytes, stop).run()
        os.fsync(stream.fileno())
        partial.rename(target)
    sync(blobs)


def has_blob(file: RemoteFile, blobs: Path) -> bool:
    """Return whether a file's bytes are there, all of them."""
    target = blobs / file.checksum
    return target.exists() and target.stat().st_size == file.num_bytes


class _Download:
    """One file on its way into an open stream, which holds its beginning."""

    def __init__(self, file: RemoteFile, open_at: OpenAt, stream: BinaryIO, on_bytes: OnBytes, stop: Event) -> None:
        self._file, self._open_at, self._stream = file, open_at, stream
        self._on_bytes, self._stop = on_bytes, stop
        self._begin()

    def run(self) -> None:
        """Bring all bytes. Raises: as `fetch_blob`."""
        self._take_up()
        for _ in range(2):  # bytes of earlier attempts may be wrong; a new download should not be
            self._receive()
            if self._digest.hexdigest() == self._file.checksum:
                return
            self._start_again()
        raise HubError(
            f"{self._file.path} arrived whole, but twice with another checksum than the hub's list has: something on "
            "the way changes it. Try again later, or over another network"
        )

    def _begin(self) -> None:
        self._position = 0
        if len(self._file.checksum) == _SHA256_DIGITS:
            self._digest = hashlib.sha256()
        else:  # as git names its blobs
            self._digest = hashlib.sha1(b"blob %d\0" % self._file.num_bytes, usedforsecurity=False)

    def _take_up(self) -> None:
        """Count the bytes downloaded before."""
        if os.fstat(self._stream.fileno()).st_size > self._file.num_bytes:
            self._start_again()
        self._stream.seek(0)
        while chunk := self._stream.read(_PIECE_BYTES):
            self._count(chunk)

    def _start_again(self) -> None:
        self._stream.seek(0)
        self._stream.truncate()
        self._on_bytes(-self._position)
        self._begin()

    def _receive(self) -> None:
        failures = 0
        while self._position < self._file.num_bytes:
            before = self._position
            try:
                self._receive_once()
            except HubConnectionError as error:
                failures = 0 if self._position > before else failures + 1
                if failures > _MAX_FAILURES:
                    raise
                self._wait(max(error.wait_s, min(_FIRST_WAIT_S * 2**failures, _MAX_WAIT_S)))

    def _receive_once(self) -> None:
        with self._open_at(self._position) as pieces:
            if pieces.start != self._position:
                if pieces.start != 0:
                    raise HubError(f"the hub sends {self._file.path} from byte {pieces.start} on, not {self._position}")
                self._start_again()  # the server knows no ranges
            for chunk in pieces.chunks:
                if self._position + len(chunk) > self._file.num_bytes:
                    raise HubError(
                        f"the hub sends more of {self._file.path} than the {self._file.num_bytes} bytes it has"
                    )
                self._write(chunk)
        if self._position < self._file.num_bytes:
            raise HubConnectionError(f"the hub broke off {self._file.path} at byte {self._position}. Try again")

    def _write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            view = view[self._stream.write(view) :]
        self._count(chunk)

    def _count(self, chunk: bytes) -> None:
        if self._stop.is_set():
            raise StoppedError
        self._digest.update(chunk)
        self._position += len(chunk)
        self._on_bytes(len(chunk))

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise StoppedError


def _locked(partial: Path, stop: Event) -> BinaryIO:
    """Open a file to go on with that no other process writes to; its lock goes with the process."""
    while True:
        stream = partial.open("a+b", buffering=0)  # what arrives has to be in the file at once
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if partial.exists() and os.path.samestat(os.fstat(stream.fileno()), partial.stat()):
                return stream
            stream.close()  # it got its name meanwhile, and is no partial one any more
        except BlockingIOError:
            stream.close()
            if stop.wait(_LOCK_S):
                raise StoppedError from None
        except BaseException:
            stream.close()
            raise
