"""A folder of extents that several processes share: which blocks are there, and no more bytes than the budget.

Lookups by key use memory only. A block with a missing or damaged file is removed from the index.
A writer takes the folder's lock, deletes the least recently used blocks of any model, and names a file once it is
complete. A file's time of modification says when it was last used. Within a prefix, later blocks count as older,
because they are useless without earlier ones.

Nothing here is waited for by a pass: every method may block on the disk, and is called from threads of their own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from moeflow.kv.disk.extent import SUFFIX, UNFINISHED, Extent, ExtentWriter, described_bytes, read_blocks, read_extent
from moeflow.kv.disk.folder_lock import folder_lock
from moeflow.kv.disk.own_files import check_folder, create_own, open_own

logger = logging.getLogger(__name__)

REFRESH_S: Final = 0.1  # what others have written is noticed so late

Gather = Callable[[int, memoryview], bool]  # copies the block of this number; False: it is gone
Take = Callable[[int, memoryview], None]


class ExtentFolder:
    """One model's blocks in a folder that may have those of others, too."""

    def __init__(self, path: Path, *, model: str, identity: bytes, block_bytes: int, max_bytes: int) -> None:
        """Create the folder if needed, for this user alone, and list its contents.

        Raises: OSError, also if it is not this user's.
        """
        self.path = path
        self.block_bytes = block_bytes
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of all files, when that was last looked at
        self._model, self._identity = model, identity
        self._lock = threading.Lock()  # of the index of the folder
        self._known: dict[str, Extent | None] = {}  # by name; None: another model's, or not whole
        self._places: dict[bytes, tuple[Extent, int]] = {}  # by key: file and position in it
        self._refreshed_s = -REFRESH_S
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(path)
        self.refresh()
        self.num_bytes = sum(size for _, size, _ in _files(path))

    def refresh(self, *, may_be_late: bool = True) -> None:
        """Take note of files that have come and gone; if it may be late, not again so soon. Raises: OSError."""
        with self._lock:
            now = time.monotonic()
            if may_be_late and now - self._refreshed_s < REFRESH_S:
                return
            self._refreshed_s = now
            prefix = _name_prefix(self._identity)
            there = {entry.name for entry in os.scandir(self.path) if entry.name.startswith(prefix)}
            for name in self._known.keys() - there:
                self._forget(name)
            for name in there - self._known.keys():
                if name.endswith(SUFFIX):
                    self._learn(name)

    def count(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first of these blocks are there."""
        with self._lock:
            return next((number for number, key in enumerate(keys) if key not in self._places), len(keys))

    def missing(self, keys: Sequence[bytes]) -> list[range]:
        """Return which of these blocks are not there, as runs."""
        runs: list[range] = []
        with self._lock:
            for number in (number for number, key in enumerate(keys) if key not in self._places):
                is_next = runs and runs[-1].stop == number
                first = runs.pop().start if is_next else number
                runs.append(range(first, number + 1))
        return runs

    def read(self, keys: Sequence[bytes], take: Take, buffer: memoryview) -> int:
        """Pass on blocks in order, up to the first missing or damaged one; return their number.

        `buffer` fits at least one block; consecutive blocks are read into it at once. Raises: OSError.
        """
        number = 0
        while number < len(keys):
            with self._lock:
                extent, position = self._places.get(keys[number], (None, 0))
            if extent is None:
                break
            stop = number + _run_length(extent, position, keys[number:])
            for block in self._whole_blocks(extent, range(position, position + stop - number), buffer):
                take(number, block)
                number += 1
            if number < stop:
                break
        return number

    def write(self, keys: Sequence[bytes], gather: Gather, buffer: memoryview, keep: Collection[str] = ()) -> int:
        """Write blocks to a file of their own, as far as they can be had; return how many bytes that took.

        The files `keep` are not deleted for it. 0: the budget or the lock could not be had. Raises: OSError.
        """
        num_bytes = len(keys) * self.block_bytes + described_bytes(len(keys))
        with folder_lock(self.path) as is_mine:
            if not is_mine or not self._make_room(num_bytes, keep):
                return 0
            unfinished = self.path / f".{keys[0].hex()}{UNFINISHED}"
            try:
                with create_own(unfinished) as stream:
                    num_written = self._write_blocks(stream, keys, gather, buffer)
                    size = stream.tell()
                if not num_written:
                    return 0
                name = _name(self._identity, keys[:num_written])
                unfinished.rename(self.path / name)
            finally:
                unfinished.unlink(missing_ok=True)
            self.num_bytes += size
            with self._lock:
                self._forget(name)
                self._learn(name)
        return size

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a prefix is in use. Raises: OSError."""
        names = list(self.names_of(keys))
        now_ns = time.time_ns()
        for number, name in enumerate(names):
            with suppress(FileNotFoundError):
                os.utime(self.path / name, ns=(now_ns, now_ns - 1000 * number), follow_symlinks=False)

    def names_of(self, keys: Collection[bytes]) -> dict[str, None]:
        """Return the files that have these blocks, in order."""
        with self._lock:
            return {self._places[key][0].path.name: None for key in keys if key in self._places}

    def _learn(self, name: str) -> None:
        extent = None
        with suppress(OSError):  # deleted, or of no use
            extent = read_extent(self.path / name)
        is_ours = extent is not None and (extent.identity, extent.block_bytes) == (self._identity, self.block_bytes)
        self._known[name] = extent if is_ours else None
        if extent is not None and is_ours:
            self._places |= {key: (extent, position) for position, key in enumerate(extent.keys)}

    def _forget(self, name: str) -> None:
        extent = self._known.pop(name, None)
        if extent is not None:
            for key in extent.keys:
                if key in self._places and self._places[key][0] is extent:
                    del self._places[key]

    def _whole_blocks(self, extent: Extent, positions: range, buffer: memoryview) -> Iterator[memoryview]:
        """Yield blocks that lie in a row in one file, up to the first that is not whole."""
        size = self.block_bytes
        at_once = len(buffer) // size
        try:
            stream = open_own(extent.path)
            if stream is None:  # no longer the file that was found
                raise FileNotFoundError
            with stream:
                for first in positions[::at_once]:
                    into = buffer[: min(at_once, positions.stop - first) * size]
                    for index, is_whole in enumerate(read_blocks(stream, extent, first, into)):
                        if not is_whole:
                            self._drop(extent)
                            return
                        yield into[index * size : (index + 1) * size]
        except FileNotFoundError:  # evicted
            with self._lock:
                self._forget(extent.path.name)

    def _drop(self, extent: Extent) -> None:
        """Delete a damaged file."""
        logger.warning("%s is damaged, and deleted: its prompts are computed again", extent.path)
        extent.path.unlink(missing_ok=True)
        with self._lock:
            self._forget(extent.path.name)

    def _write_blocks(self, stream: BinaryIO, keys: Sequence[bytes], gather: Gather, buffer: memoryview) -> int:
        writer = ExtentWriter(stream, model=self._model, identity=self._identity, block_bytes=self.block_bytes)
        at_once = len(buffer) // self.block_bytes
        num_written = 0
        while num_written < len(keys):
            wanted = min(at_once, len(keys) - num_written)
            pieces = (buffer[index * self.block_bytes : (index + 1) * self.block_bytes] for index in range(wanted))
            had = next((i for i, piece in enumerate(pieces) if not gather(num_written + i, piece)), wanted)
            if had:
                writer.append(buffer[: had * self.block_bytes])
            num_written += had
            if had < wanted:
                break
        writer.finish(keys[:num_written])
        return num_written

    def _make_room(self, num_bytes: int, keep: Collection[str]) -> bool:
        """Delete the least recently used files until so many more bytes fit the budget; False if it cannot be."""
        for leftover in self.path.glob(f".*{UNFINISHED}"):  # of a killed writer: the lock excludes others
            leftover.unlink(missing_ok=True)
        files = sorted(_files(self.path))
        self.num_bytes = sum(size for _, size, _ in files)
        excess = self.num_bytes + num_bytes - self.max_bytes
        deletable = [(size, name) for _, size, name in files if name not in keep]
        if excess > sum(size for size, _ in deletable):
            return False
        for size, name in deletable:
            if excess <= 0:
                break
            (self.path / name).unlink(missing_ok=True)
            excess -= size
            self.num_bytes -= size
            with self._lock:
                self._forget(name)
        return True


def _name_prefix(identity: bytes) -> str:
    return f"{identity[:8].hex()}-"


def _name(identity: bytes, keys: Sequence[bytes]) -> str:
    return f"{_name_prefix(identity)}{keys[0][:6].hex()}-{keys[-1][:10].hex()}{SUFFIX}"


def _files(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (time of last use, bytes, name) of all extents."""
    for entry in os.scandir(folder):
        if entry.name.endswith(SUFFIX):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield status.st_mtime_ns, status.st_size, entry.name


def _run_length(extent: Extent, position: int, keys: Sequence[bytes]) -> int:
    """Return how many of the keys lie in a row from a position on."""
    there = extent.keys[position : position + len(keys)]
    return next((i for i, (a, b) in enumerate(zip(there, keys, strict=False)) if a != b), len(there))
