"""What an engine's process is doing: a page of memory that its parent maps, too, and can read after any death.

A heartbeat shows that the process runs; an entry names the requests of the pass under way. A message could not do
either: it waits until a pass ends, and unsent messages are lost with the process.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Mapping

import msgspec

_REQUEST_BYTES = 128  # of an entry, for each request: ids are shorter
_BEAT = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")  # of the entry; 0: no pass is under way
_ENTRY_AT = 16


class PassRecord:
    """One process's record: the parent makes it, the child opens it, both map the same bytes."""

    def __init__(self, descriptor: int) -> None:
        """Map the record that `make_descriptor` made. The descriptor is closed."""
        try:
            self._memory = mmap.mmap(descriptor, 0)  # all of it
        finally:
            os.close(descriptor)

    @property
    def beat(self) -> int:
        """A number that grows as long as the process runs; 0: it has not begun."""
        (beat,) = _BEAT.unpack_from(self._memory, 0)
        return int(beat)

    def tick(self) -> None:
        """Record that the process runs."""
        _BEAT.pack_into(self._memory, 0, self.beat + 1)

    def begin(self, requests: Mapping[str, int]) -> None:
        """Note which requests the next pass computes, and how many output tokens each has."""
        entry = msgspec.msgpack.encode(requests)
        if _ENTRY_AT + len(entry) <= len(self._memory):
            self._memory[_ENTRY_AT : _ENTRY_AT + len(entry)] = entry
            _LENGTH.pack_into(self._memory, _BEAT.size, len(entry))  # last: half an entry is never read

    def end(self) -> None:
        """No pass is under way."""
        _LENGTH.pack_into(self._memory, _BEAT.size, 0)

    def in_pass(self) -> dict[str, int]:
        """Return the requests of the pass under way and their output tokens; of a dead process, of its last one."""
        (length,) = _LENGTH.unpack_from(self._memory, _BEAT.size)
        if not length:
            return {}
        return msgspec.msgpack.decode(self._memory[_ENTRY_AT : _ENTRY_AT + length], type=dict[str, int])

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


def make_descriptor(max_num_seqs: int) -> int:
    """Make the memory of a record.

    Its size fits passes of `max_num_seqs` requests only, because users may limit the size of files.

    Raises: OSError.
    """
    return make_memory(_ENTRY_AT + max_num_seqs * _REQUEST_BYTES)


def make_memory(num_bytes: int) -> int:
    """Make zeroed memory that a child can inherit and map: a file without a name. Raises: OSError."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("moeflow-memory")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return descriptor
