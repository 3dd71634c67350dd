"""Connections that are accepted and not yet authenticated: which may begin a handshake, and which have to leave.

A stranger can open connections faster than handshakes end. So each address gets a share of the handshakes. When too
many connections wait, the longest silent one of the address with the most connections closes. A rank at another
address keeps its place. This module knows no sockets.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Generic, TypeVar

MAX_WAITING: Final = 256  # connections that have not sent a greeting, or wait for their handshake
MAX_HANDSHAKES: Final = 32  # at once
MAX_HANDSHAKES_OF_ADDRESS: Final = 8

Waiting = TypeVar("Waiting")


class PendingConnections(Generic[Waiting]):
    """Connections by address, each with the time at which its patience ends."""

    def __init__(self) -> None:
        self._deadlines_s: dict[Waiting, float] = {}  # in order of arrival
        self._addresses: dict[Waiting, str] = {}
        self._greeted: dict[Waiting, None] = {}  # in order of their greetings
        self._num_waiting: Counter[str] = Counter()
        self._num_handshakes: Counter[str] = Counter()

    def enter(self, connection: Waiting, address: str, deadline_s: float) -> Waiting | None:
        """Take in a connection. Returns the one that has to leave for it, if any."""
        self._deadlines_s[connection] = deadline_s
        self._addresses[connection] = address
        self._num_waiting[address] += 1
        if len(self._deadlines_s) <= MAX_WAITING:
            return None
        (largest, _), *_ = self._num_waiting.most_common(1)
        of_largest = [one for one in self._deadlines_s if self._addresses[one] == largest]
        victim = next((one for one in of_largest if one not in self._greeted), of_largest[0])
        self.leave(victim)
        return victim

    def leave(self, connection: Waiting) -> None:
        """Forget a connection that waits."""
        del self._deadlines_s[connection]
        self._greeted.pop(connection, None)
        address = self._addresses.pop(connection)
        self._num_waiting[address] -= 1
        if not self._num_waiting[address]:
            del self._num_waiting[address]

    def greet(self, connection: Waiting) -> None:
        """Note that a connection has sent its greeting."""
        self._greeted[connection] = None

    def next(self) -> Waiting | None:
        """Begin a handshake, if one may begin: of the address that has the fewest. Returns the connection."""
        if self._num_handshakes.total() >= MAX_HANDSHAKES or not self._greeted:
            return None
        connection = min(self._greeted, key=lambda one: self._num_handshakes[self._addresses[one]])
        address = self._addresses[connection]
        if self._num_handshakes[address] >= MAX_HANDSHAKES_OF_ADDRESS:
            return None
        self.leave(connection)
        self._num_handshakes[address] += 1
        return connection

    def finish(self, address: str) -> None:
        """Note the end of a handshake."""
        self._num_handshakes[address] -= 1
        if not self._num_handshakes[address]:
            del self._num_handshakes[address]

    def overdue(self, now_s: float) -> list[Waiting]:
        """Forget and return the connections whose patience has ended."""
        late = [one for one, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]
        for connection in late:
            self.leave(connection)
        return late

    def next_deadline_s(self) -> float | None:
        """Return when the first connection is overdue."""
        return next(iter(self._deadlines_s.values()), None)

    def empty(self) -> list[Waiting]:
        """Forget and return all connections."""
        return self.overdue(float("inf"))
