"""Shares a few places among clients: each client has one at a time, so that none waits for all the work of another.

For asyncio. Knows nothing of the work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from moeflow.core.errors import QueueFullError

RETRY_AFTER_S: Final = 2.0


@dataclass(slots=True)
class _Client:
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    work: Counter[Hashable] = field(default_factory=Counter)  # that waits or has its turn


class FairTurns:
    """Clients wait for their own work, oldest first, and then for one of the places."""

    def __init__(self, num_places: int, max_waiting: int | None = None) -> None:
        """`max_waiting` is how many different pieces of one client's work may wait; None: any number."""
        self._places = asyncio.Semaphore(num_places)
        self._max_waiting = max_waiting
        self._clients: dict[str | None, _Client] = {}

    def require_room(self, client: str | None) -> None:
        """Raise QueueFullError if too much work of a client waits for more to come."""
        own = self._clients.get(client)
        if own is None or client is None or self._max_waiting is None or len(own.work) <= self._max_waiting:
            return
        raise QueueFullError(
            f"{self._max_waiting} forms of this client's answers wait to be compiled; try again later",
            retry_after_s=RETRY_AFTER_S,
        )

    @asynccontextmanager
    async def turn(self, client: str | None, work: Hashable = None) -> AsyncGenerator[None, None]:
        """Wait for a turn of a client, and have it in the block. `client` None: the server itself, never refused.

        Raises: QueueFullError if too much work of this client waits already; the same work may wait again.
        """
        if client not in self._clients or work not in self._clients[client].work:
            self.require_room(client)
        own = self._clients.setdefault(client, _Client())
        own.work[work] += 1
        try:
            async with own.turn, self._places:
                yield
        finally:
            own.work[work] -= 1
            if not own.work[work]:
                del own.work[work]
            if not own.work:
                del self._clients[client]
