"""A thread that passes on the messages of a link, so that other threads never wait for the network."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from moeflow.core.errors import GroupError
from moeflow.parallel.tcp.link import Link, Message

logger = logging.getLogger(__name__)


class MessageHandler(Protocol):
    """Takes messages. Called by the link's thread, one after the other."""

    def take(self, message: Message) -> None:
        """Take a message. Raises: GroupError if it is not expected, which ends the link."""

    def ended(self, error: GroupError) -> None:
        """The link has ended, by either end; called once."""


class LinkThread:
    """The thread of one link, which it takes over."""

    def __init__(self, link: Link, handler: MessageHandler, name: str) -> None:
        """Begin."""
        self.peer = link.peer
        self._link, self._handler = link, handler
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, label: str, payload: memoryview) -> None:
        """Send a message. If the link has ended nothing happens: the handler is called."""
        self._link.send_message(label, payload)

    def end(self, reason: str) -> None:
        """End the link and tell the other end why; returns at once."""
        self._link.say_farewell(reason)

    def close(self, reason: str) -> None:
        """End the link likewise. Blocks: until its thread has ended; not for that thread itself."""
        self.end(reason)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._handler.take(self._link.next("a message", None))
        except GroupError as failure:
            error = failure
        except Exception as failure:  # our own mistake: it ends this link, not the process
            logger.exception("the link to %s failed", self.peer)
            error = GroupError(f"{type(failure).__name__}: {failure}")
        self._link.say_farewell(str(error))
        self._handler.ended(error)
