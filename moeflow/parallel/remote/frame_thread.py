"""Serves a link both ways in a thread of its own: it sends frames in order, and passes on received ones.

So other threads never wait for the network, and two ends that send much to each other never deadlock.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from contextlib import suppress
from typing import Protocol

from moeflow.core.errors import GroupError
from moeflow.parallel.tcp.frames import FrameHead, Kind
from moeflow.parallel.tcp.tcp_link import TcpLink

logger = logging.getLogger(__name__)


class FrameHandler(Protocol):
    """Takes what comes. Called by the link's thread, one after the other."""

    def open(self, head: FrameHead) -> memoryview:
        """Return where a frame's payload goes. Raises: GroupError if it is not expected, which ends the link."""

    def complete(self) -> None:
        """The payload of the frame opened last is there, and authentic. Raises: GroupError likewise."""

    def ended(self, error: GroupError) -> None:
        """The link has ended, by either end; called once."""


class FrameThread:
    """The thread of one link, which it takes over."""

    def __init__(self, link: TcpLink, handler: FrameHandler, name: str) -> None:
        """Begin."""
        self.peer = link.peer
        self._link, self._handler = link, handler
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, memoryview]] = deque()
        self._is_sending = False
        self._end_reason: str | None = None  # why this side ends
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, label: str, payload: memoryview) -> None:
        """Send a frame, or have it sent as soon as those before it are. The payload must not change any more.

        If the link has ended nothing happens: the handler gets to know.
        """
        with self._lock:
            if self._wake < 0:
                return
            self._waiting.append((label, payload))
            if not self._is_sending and self._push():
                os.eventfd_write(self._wake, 1)

    def end(self, reason: str) -> None:
        """End the link and tell the other end why; returns at once."""
        with self._lock:
            if self._wake >= 0 and self._end_reason is None:
                self._end_reason = reason
                os.eventfd_write(self._wake, 1)

    def close(self, reason: str) -> None:
        """End the link likewise. Blocks: until its thread has ended; not for that thread itself."""
        self.end(reason)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _push(self) -> bool:
        """Send what the kernel takes; return whether something is left. The lock is held."""
        while self._link.push():
            if not self._waiting:
                self._is_sending = False
                return False
            label, payload = self._waiting.popleft()
            self._link.start_sending(Kind.MESSAGE, label, payload)
            self._is_sending = True
        return True

    def _run(self) -> None:
        error = GroupError("")
        try:
            self._serve()
            error = GroupError(self._end_reason or "it was ended")
        except GroupError as failure:
            error = failure
        except Exception as failure:  # our own mistake: it ends this link, not the process
            logger.exception("the link to %s failed", self.peer)
            error = GroupError(f"{type(failure).__name__}: {failure}")
        self._link.say_farewell(str(error))
        self._link.close()
        with self._lock:
            os.close(self._wake)
            self._wake = -1
            self._waiting.clear()
        self._handler.ended(error)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while self._end_reason is None:
            with self._lock:
                is_blocked = self._push()
            poll.register(self._link, select.POLLIN | (select.POLLOUT if is_blocked else 0))
            poll.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            while self._link.pull(self._handler.open):
                self._handler.complete()
