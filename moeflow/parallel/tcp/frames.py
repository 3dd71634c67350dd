"""What a frame is: a head with a kind and a label, its MAC, and, if there is a payload, that and another MAC.

MACs are BLAKE2b with a key for each direction and a frame counter, so that a frame cannot be changed, repeated, omitted
or reflected. Knows no connection.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

HEAD: Final = struct.Struct("<BHQ")  # kind, bytes of the label, bytes of the payload
MAC_BYTES: Final = 16
MAX_LABEL_BYTES: Final = 4096
_PIECE_BYTES: Final = 256 << 10  # of a payload: while the kernel sends one, the next is hashed


class Kind(IntEnum):
    """What a frame is."""

    COLLECTIVE = 1  # one rank's part in it
    MESSAGE = 2
    FAREWELL = 3  # the label says why the other rank has ended the group


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The header of a payload."""

    kind: int
    label: str
    num_bytes: int  # of the payload


class FrameMacs:
    """The MACs of one direction, frame by frame."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0  # of the frame
        self._payload_hash = self._new(b"payload")

    def frame(self, kind: Kind, label: bytes, payload: memoryview) -> Iterator[list[memoryview]]:
        """Yield a frame in pieces, each when the one before is out. A frame is begun when the one before is over."""
        assert len(label) <= MAX_LABEL_BYTES, "labels are short"
        head = HEAD.pack(kind, len(label), len(payload)) + label
        buffers = [memoryview(head + self._head_mac(head))]
        for start in range(0, len(payload), _PIECE_BYTES):
            piece = payload[start : start + _PIECE_BYTES]
            self.add(piece)
            buffers.append(piece)
            if start + _PIECE_BYTES >= len(payload):
                buffers.append(memoryview(self._payload_mac()))
            yield buffers
            buffers = []
        if buffers:
            yield buffers

    def is_head(self, head: memoryview, mac: memoryview) -> bool:
        """Return whether a head is what the other end has sent now."""
        return hmac.compare_digest(self._head_mac(head), mac)

    def add(self, piece: memoryview) -> None:
        """Add a piece of the payload."""
        self._payload_hash.update(piece)

    def is_payload(self, mac: memoryview) -> bool:
        """Return whether the pieces added are what the other end has sent."""
        return hmac.compare_digest(self._payload_mac(), mac)

    def _head_mac(self, head: bytes | memoryview) -> bytes:
        self._number += 1
        self._payload_hash = self._new(b"payload")
        mac = self._new(b"head")
        mac.update(head)
        return mac.digest()

    def _payload_mac(self) -> bytes:
        return self._payload_hash.digest()

    def _new(self, what: bytes) -> hashlib.blake2b:
        number = self._number.to_bytes(8, "little")
        return hashlib.blake2b(number, key=self._key, digest_size=MAC_BYTES, person=what)
