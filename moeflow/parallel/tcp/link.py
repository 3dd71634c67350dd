"""An encrypted connection to another process, as messages: a kind, a label and bytes.

An `Endpoint` carries its messages. Sending never waits for the other end: the socket copies the message and a thread of
ZeroMQ sends it. Messages arrive whole and in order. A link ends with a farewell, or when the connection breaks.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from moeflow.core.address import format_address
from moeflow.core.errors import GroupError

PIECE_BYTES: Final = 256 << 10  # of a payload: one piece is encrypted while the network carries the one before
MAX_MESSAGE_BYTES: Final = 64 << 20
_MAX_REASON_BYTES: Final = 1000
_HEAD: Final = struct.Struct("<BQ")  # kind, bytes of the payload; the label follows


class Kind(IntEnum):
    """The kinds of messages."""

    HELLO = 0  # the first message of the connecting end
    COLLECTIVE = 1  # one rank's part
    MESSAGE = 2
    FAREWELL = 3  # the label is the reason; empty: the other end has closed the link


@dataclass(frozen=True, slots=True)
class Message:
    """A message that has arrived."""

    kind: int
    label: str
    num_bytes: int  # of the payload
    pieces: Sequence[memoryview]

    @classmethod
    def of(cls, frames: Sequence[memoryview]) -> Message:
        """Read the frames of a message. Raises: GroupError if they are none."""
        head = bytes(frames[0])
        if len(head) < _HEAD.size:
            raise GroupError(f"a message has a head of {len(head)} bytes")
        kind, num_bytes = _HEAD.unpack_from(head)
        if sum(len(piece) for piece in frames[1:]) != num_bytes:
            raise GroupError(f"a message announces {num_bytes} bytes and has others")
        return cls(kind, head[_HEAD.size :].decode(errors="replace"), num_bytes, frames[1:])

    def frames(self) -> list[memoryview]:
        """Return what `of` reads."""
        head = _HEAD.pack(self.kind, self.num_bytes) + self.label.encode()
        return [memoryview(head), *self.pieces]

    def copy_to(self, target: memoryview) -> None:
        """Copy the payload to memory of its size."""
        start = 0
        for piece in self.pieces:
            target[start : start + len(piece)] = piece
            start += len(piece)

    def payload(self) -> bytearray:
        """Return the payload."""
        return bytearray().join(self.pieces)


class Carrier(Protocol):
    """Carries the messages of links; an `Endpoint` does."""

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """See `Endpoint`."""

    def receive(self) -> None:
        """See `Endpoint`."""

    def send(self, link: Link, frames: Sequence[memoryview]) -> None:
        """See `Endpoint`."""

    def end(self, link: Link, reason: str) -> None:
        """See `Endpoint`."""

    def close(self) -> None:
        """See `Endpoint`."""


class Link:
    """One end of a connection. One thread receives; any thread may send."""

    def __init__(self, endpoint: Carrier, routing_id: bytes, host: str, port: int) -> None:
        """Only an `Endpoint` makes links; `host` and `port` are those of the other end."""
        self.endpoint, self.routing_id = endpoint, routing_id
        self.host, self.port = host, port
        self.address = format_address(host, port)
        self.peer = self.address  # as errors call it
        self._inbox: deque[Message] = deque()
        self._end_reason: str | None = None

    # Called by the endpoint, which has its lock.

    def deliver(self, message: Message) -> None:
        """Take a message that has arrived."""
        if self._end_reason is not None:
            return
        if message.kind == Kind.FAREWELL:
            self.note_end(
                f"{self.peer} ended the group: {message.label}"
                if message.label
                else f"{self.peer} has closed the connection: see what it says, if it is still there"
            )
        else:
            self._inbox.append(message)

    def note_end(self, reason: str) -> None:
        """Take the reason of the end, unless there is one."""
        if self._end_reason is None:
            self._end_reason = reason

    # Called by users.

    @property
    def is_ready(self) -> bool:
        """Whether `take` returns a message, or raises."""
        return bool(self._inbox) or self._end_reason is not None

    def has_ended(self) -> bool:
        """Return whether the link has ended, as far as is known."""
        self.endpoint.receive()
        return self._end_reason is not None

    def take(self) -> Message | None:
        """Return a message that has arrived; None: there is none.

        Raises: GroupError if the link has ended, after the messages before.
        """
        if self._inbox:
            return self._inbox.popleft()
        if self._end_reason is not None:
            raise GroupError(self._end_reason)
        return None

    def next(self, what: str, timeout_s: float | None) -> Message:
        """Return the next message. Blocks: for ever, if there is no `timeout_s`.

        Raises: GroupError if the link ends; if nothing, called `what`, comes in time.
        """
        if not self.endpoint.wait(lambda: self.is_ready, timeout_s):
            raise GroupError(f"{self.peer} has not sent {what} within {timeout_s:g} s")
        message = self.take()
        assert message is not None
        return message

    def check_idle(self) -> None:
        """Look whether the other end is there, while nothing is expected of it.

        Raises: GroupError if the link has ended, or anything has come.
        """
        self.endpoint.receive()
        message = self.take()
        if message is not None:
            raise GroupError(f"{self.peer} sends {message.label!r} where nothing is expected")

    def send(self, kind: Kind, label: str, payload: memoryview) -> None:
        """Send a message; its memory may change afterwards. If the link has ended nothing happens."""
        if self._end_reason is None:
            pieces = [payload[start : start + PIECE_BYTES] for start in range(0, len(payload), PIECE_BYTES)]
            self.endpoint.send(self, Message(kind, label, len(payload), pieces).frames())

    def send_message(self, name: str, data: bytes | memoryview) -> None:
        """Send a message with a name."""
        self.send(Kind.MESSAGE, name, memoryview(data))

    def receive_message(self, name: str, timeout_s: float | None) -> bytes:
        """Return the next message, which must be of this name. Blocks and raises: as `next`."""
        message = self.next(f"message {name!r}", timeout_s)
        if (message.kind, message.label) != (Kind.MESSAGE, name):
            raise GroupError(f"{self.peer} sends {message.label!r} where message {name!r} is expected")
        if message.num_bytes > MAX_MESSAGE_BYTES:
            raise GroupError(f"{self.peer} sends a message of {message.num_bytes} bytes, which none has")
        return bytes(message.payload())

    def say_farewell(self, reason: str) -> None:
        """End the link, and tell the other end why."""
        label = reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
        self.send(Kind.FAREWELL, label, memoryview(b""))
        self.endpoint.end(self, reason or "it was closed")
        self._inbox.clear()

    def close(self) -> None:
        """End the link."""
        self.say_farewell("")
