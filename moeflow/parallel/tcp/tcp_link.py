"""An authenticated TCP connection to another rank, as frames: a kind, a label and bytes, each with a MAC.

Sending and receiving move the bytes that the kernel accepts and return, so that many links are served at once without
deadlock. Messages use a single link and block. The header of a frame is authenticated before use. The receiver then
chooses the buffer for the bytes, or refuses them.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from moeflow.core.address import format_address
from moeflow.core.errors import GroupError
from moeflow.parallel.tcp.authentication import SessionKeys
from moeflow.parallel.tcp.frames import HEAD, MAC_BYTES, MAX_LABEL_BYTES, FrameHead, FrameMacs, Kind

MAX_MESSAGE_BYTES: Final = 64 << 20
_MAX_REASON_BYTES: Final = 1000
_BUFFER_BYTES: Final = 64 << 10
_SEE_THERE: Final = "see what it says, if it is still there"
_SILENT_S: Final = 10  # an idle connection is tried after so long, ...
_RETRY_S: Final = 5  # ... then so often, ...
_RETRIES: Final = 4  # ... and taken to be cut after so many without an answer


OpenPayload = Callable[[FrameHead], memoryview]  # returns where it goes; raises GroupError if it is not expected


class TcpLink:
    """One end of a connection. One thread uses it; `say_farewell` may come from any."""

    def __init__(self, connection: socket.socket, keys: SessionKeys) -> None:
        """Take over an authenticated connection."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection)
        self._connection = connection
        self.host, port = connection.getpeername()[:2]  # of the other end
        self.address = format_address(self.host, port)
        self.peer = self.address  # as errors call it
        self._sender, self._receiver = FrameMacs(keys.sending), FrameMacs(keys.receiving)
        self._lock = threading.Lock()  # what is sent
        self._pieces: Iterator[list[memoryview]] = iter(())
        self._unsent: list[memoryview] = []
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._stop = 0  # of its contents
        self._payload: memoryview | None = None  # of the frame whose head has come
        self._num_received = 0  # bytes of it

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._connection.fileno()

    @property
    def local_host(self) -> str:
        """The address of this end, under which the other one's network reaches this machine."""
        host: str = self._connection.getsockname()[0]
        return host

    def has_ended(self) -> bool:
        """Return whether the other end has closed, as far as is known."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def check_idle(self) -> None:
        """Look whether the other end is there, while nothing is expected of it.

        Raises: GroupError if it has closed, ends the group, or sends anything else.
        """

        def refuse(head: FrameHead) -> memoryview:
            raise GroupError(f"{self.peer} sends {head.label!r} where nothing is expected")

        self.pull(refuse)

    def start_sending(self, kind: Kind, label: str, payload: memoryview) -> None:
        """Begin a frame, when the one before is out; `push` sends it. The payload must not change meanwhile."""
        with self._lock:
            assert not self._unsent, "one frame after another"
            self._pieces = self._sender.frame(kind, label.encode(), payload)
            self._unsent = next(self._pieces)

    def push(self) -> bool:
        """Send what the kernel takes; return whether nothing is left to send.

        An end that has gone accepts everything; receiving from it raises the reason.
        """
        with self._lock:
            try:
                while self._unsent:
                    _drop(self._unsent, self._connection.sendmsg(self._unsent))
                    self._unsent = self._unsent or next(self._pieces, [])
            except BlockingIOError:
                return False
            except OSError:
                self._unsent = []
            return True

    def pull(self, open_payload: OpenPayload) -> bool:
        """Receive the available bytes of a frame; return whether it is complete.

        Raises: GroupError if the other end is gone or ends the group, if bytes are not authentic, or are not expected.
        """
        while True:
            if self._payload is None and (head := self._take_head()) is not None:
                self._payload, self._num_received = open_payload(head), 0
            if self._payload is not None and self._take_payload(self._payload):
                self._payload = None
                return True
            if not self._fill():
                return False

    def send_message(self, name: str, data: bytes | memoryview, timeout_s: float) -> None:
        """Send a message. Blocks: until the kernel has it. Raises: GroupError if that takes longer than allowed."""
        self.start_sending(Kind.MESSAGE, name, memoryview(data))
        deadline_s = time.monotonic() + timeout_s
        while not self.push():
            self._wait(select.POLLOUT, deadline_s, f"taken message {name!r}", timeout_s)

    def receive_message(self, name: str, timeout_s: float | None) -> bytes:
        """Return the next message, which must be of this name. Blocks: for ever, if there is no `timeout_s`.

        Raises: GroupError as `pull`; if it does not come in time.
        """
        found = bytearray()

        def open_payload(head: FrameHead) -> memoryview:
            nonlocal found
            if (head.kind, head.label) != (Kind.MESSAGE, name):
                raise GroupError(f"{self.peer} sends {head.label!r} where message {name!r} is expected")
            if head.num_bytes > MAX_MESSAGE_BYTES:
                raise GroupError(f"{self.peer} sends a message of {head.num_bytes} bytes, which none has")
            found = bytearray(head.num_bytes)
            return memoryview(found)

        self.receive_frame(open_payload, f"message {name!r}", timeout_s)
        return bytes(found)

    def receive_frame(self, open_payload: OpenPayload, what: str, timeout_s: float | None) -> None:
        """Receive a frame to where `open_payload` says. Blocks: for ever, if there is no `timeout_s`.

        Raises: GroupError as `pull`; if it, called `what`, does not come in time.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.pull(open_payload):
            self._wait(select.POLLIN, deadline_s, f"sent {what}", timeout_s)

    def say_farewell(self, reason: str) -> None:
        """Notify the other end, if possible, that the group has ended, and close the connection both ways."""
        with self._lock:
            if not self._unsent:
                label = reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore").encode()
                with suppress(OSError):  # a full buffer, too: then the end alone must do
                    self._connection.sendmsg(next(self._sender.frame(Kind.FAREWELL, label, memoryview(b""))))
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _take_head(self) -> FrameHead | None:
        """Return the head that is in the buffer; None: not all of it."""
        have = self._buffer[self._start : self._stop]
        if len(have) < HEAD.size:
            return None
        kind, label_bytes, num_bytes = HEAD.unpack_from(have)
        if label_bytes > MAX_LABEL_BYTES:
            raise self._not_authentic()
        size = HEAD.size + label_bytes
        if len(have) < size + MAC_BYTES:
            return None
        if not self._receiver.is_head(have[:size], have[size : size + MAC_BYTES]):
            raise self._not_authentic()
        label = bytes(have[HEAD.size : size]).decode(errors="replace")
        self._start += size + MAC_BYTES
        if kind == Kind.FAREWELL:
            raise GroupError(f"{self.peer} ended the group: {label}")
        return FrameHead(kind, label, num_bytes)

    def _take_payload(self, payload: memoryview) -> bool:
        """Move the buffered bytes to their destination; return whether the frame is complete."""
        if not payload:
            return True
        start = self._num_received
        num_bytes = min(self._stop - self._start, len(payload) - start)
        payload[start : start + num_bytes] = self._buffer[self._start : self._start + num_bytes]
        self._start += num_bytes
        self._count(payload, num_bytes)
        if self._num_received < len(payload) or self._stop - self._start < MAC_BYTES:
            return False
        if not self._receiver.is_payload(self._buffer[self._start : self._start + MAC_BYTES]):
            raise self._not_authentic()
        self._start += MAC_BYTES
        return True

    def _count(self, payload: memoryview, num_bytes: int) -> None:
        """Note that so many bytes more of a payload have come."""
        start = self._num_received
        self._num_received += num_bytes
        self._receiver.add(payload[start : self._num_received])

    def _fill(self) -> bool:
        """Receive, past the buffer where the payload is known; return whether anything came."""
        if self._start:  # little is left, if anything
            left = bytes(self._buffer[self._start : self._stop])
            self._buffer[: len(left)] = left
            self._start, self._stop = 0, len(left)
        rest = self._buffer[:0] if self._payload is None else self._payload[self._num_received :]
        try:
            num_bytes = self._connection.recvmsg_into([rest, self._buffer[self._stop :]])[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise GroupError(f"{self.peer} is gone ({error.strerror}): {_SEE_THERE}") from None
        if not num_bytes:
            raise GroupError(f"{self.peer} has closed the connection: {_SEE_THERE}")
        if self._payload is not None:
            self._count(self._payload, min(num_bytes, len(rest)))
        self._stop += max(num_bytes - len(rest), 0)
        return True

    def _wait(self, event: int, deadline_s: float | None, what: str, timeout_s: float | None) -> None:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise GroupError(f"{self.peer} has not {what} within {timeout_s:g} s")
        poll = select.poll()
        poll.register(self._connection, event)
        poll.poll(None if left_s is None else left_s * 1000 + 1)

    def _not_authentic(self) -> GroupError:
        return GroupError(f"bytes from {self.peer} are not authentic: something between changes or repeats them")


def _drop(buffers: list[memoryview], num_bytes: int) -> None:
    """Take so many bytes off the front."""
    while num_bytes:
        first = buffers[0]
        if num_bytes < len(first):
            buffers[0] = first[num_bytes:]
            return
        num_bytes -= len(first)
        del buffers[0]


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice that an idle connection is cut. In a collective its deadline does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _SILENT_S), ("TCP_KEEPINTVL", _RETRY_S), ("TCP_KEEPCNT", _RETRIES)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
