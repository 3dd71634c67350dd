"""Connections that are accepted and not yet authenticated, and which of them has to leave for a new one.

A stranger can open connections faster than handshakes end. When too many wait, the oldest one of the address with the
most connections closes. A rank at another address keeps its place. This module knows no sockets.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Generic, TypeVar

MAX_WAITING: Final = 256

Waiting = TypeVar("Waiting")


class PendingConnections(Generic[Waiting]):
    """Connections by address."""

    def __init__(self) -> None:
        self._addresses: dict[Waiting, str] = {}  # in order of arrival
        self._num_waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, connection: Waiting) -> bool:
        return connection in self._addresses

    def enter(self, connection: Waiting, address: str) -> Waiting | None:
        """Take in a connection. Returns the one that has to leave for it, if any."""
        self._addresses[connection] = address
        self._num_waiting[address] += 1
        if len(self._addresses) <= MAX_WAITING:
            return None
        (largest, _), *_ = self._num_waiting.most_common(1)
        victim = next(one for one in self._addresses if self._addresses[one] == largest)
        self.leave(victim)
        return victim

    def leave(self, connection: Waiting) -> None:
        """Forget a connection, if it waits."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._num_waiting[address] -= 1
            if not self._num_waiting[address]:
                del self._num_waiting[address]
