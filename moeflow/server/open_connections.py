"""How many connections may be open at once, and which of them close for a new one.

Each connection takes a file descriptor, and a process has a limited number of these. A client without a key could
take all of them. So the number of connections is limited, and a full server closes silent ones. The address with the
most connections loses its longest silent ones first. A connection whose request is complete never closes for a new one.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, Protocol

MAX_CONNECTIONS: Final = 4096
MAX_DESCRIPTORS: Final = 65_536  # more make some programs slow that close all of them
ACCEPTED_AT_ONCE: Final = 32  # connections that the event loop accepts before it does anything else
_UNCOUNTED: Final = 8 * ACCEPTED_AT_ONCE  # connections whose descriptors are open before they are admitted or after
_OTHER_DESCRIPTORS: Final = 256  # files of models, sockets to engines, uploads
_FREED_SHARE: Final = 16  # a full server frees this part of its places at once, so that it looks for them rarely
_LOG_EVERY_S: Final = 60.0

logger = logging.getLogger(__name__)


class Connection(Protocol):
    """A client's connection, as the limit sees it."""

    @property
    def address(self) -> str | None:
        """The client's address; None: unknown."""

    @property
    def silent_since_s(self) -> float | None:
        """When the connection last got a piece of a request; None: a request is complete and is answered."""

    def close_silently(self) -> None:
        """Close the connection without an answer."""

    def refuse(self) -> None:
        """Answer that the server is full, and close the connection."""


def raise_descriptor_limit() -> int:
    """Let this process open as many files as the system allows it. Returns the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


def max_connections(num_descriptors: int, *, num_ports: int = 1) -> int:
    """Return how many connections to each port may be open in a process that may open so many files."""
    return max(min(MAX_CONNECTIONS, (num_descriptors - _OTHER_DESCRIPTORS) // num_ports - _UNCOUNTED), 1)


class OpenConnections:
    """Keeps the number of open connections within a limit."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._logged_s: float | None = None
        self._num_closed = 0  # since the last line of the log
        self._num_refused = 0

    def admit(self, new: Connection, connections: Collection[Connection]) -> None:
        """Take in a new connection, which is among `connections`, or refuse it."""
        if len(connections) <= self.limit:
            return
        victims = self._silent_ones(new, connections)
        excess = len(connections) - self.limit
        for victim in victims[: excess + self.limit // _FREED_SHARE]:
            victim.close_silently()
            self._num_closed += 1
        if len(victims) < excess:
            new.refuse()
            self._num_refused += 1
        self._log()

    def _silent_ones(self, new: Connection, connections: Collection[Connection]) -> list[Connection]:
        """Return connections that may be closed, the first to close in front."""
        counts = Counter(connection.address for connection in connections)
        silent = [
            (-counts[connection.address], since_s, index, connection)
            for index, connection in enumerate(connections)
            if connection is not new and (since_s := connection.silent_since_s) is not None
        ]
        return [connection for *_, connection in sorted(silent)]

    def _log(self) -> None:
        now_s = self._clock()
        if self._logged_s is not None and now_s - self._logged_s < _LOG_EVERY_S:
            return
        logger.warning(
            "all %d connections are in use: closed %d silent ones and refused %d new ones; a higher limit of open "
            "files (ulimit -n) allows up to %d connections",
            self.limit,
            self._num_closed,
            self._num_refused,
            MAX_CONNECTIONS,
        )
        self._logged_s, self._num_closed, self._num_refused = now_s, 0, 0
