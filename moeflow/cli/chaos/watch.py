"""Looks at `/health` all the time: when it shows a fault, and when the service is whole again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

_LOOK_S = 0.03
_TIMEOUT_S = 5.0  # an orchestrator takes a server that is silent for longer for dead


@dataclass(slots=True)
class HealthWatch:
    """The changes of a server's health."""

    changes: list[tuple[float, bool]] = field(default_factory=list)  # moment, and whether all engines are ready
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, client: httpx.AsyncClient) -> None:
        """Look until cancelled."""
        while True:
            whole = await is_whole(client)
            if not self.changes or self.changes[-1][1] is not whole:
                self.changes.append((time.monotonic(), whole))
                self.changed.set()
            await asyncio.sleep(_LOOK_S)

    @property
    def is_whole(self) -> bool:
        """Whether all engines are ready, as seen last."""
        return bool(self.changes) and self.changes[-1][1]

    def seen_after_s(self, begin_s: float) -> float | None:
        """Return how long a fault was not seen; None: it never was."""
        return next((at_s - begin_s for at_s, whole in self.changes if not whole and at_s >= begin_s), None)

    def back_after_s(self, begin_s: float) -> float | None:
        """Return how long after a fault's begin all engines were ready; None: it was not seen, or they are not."""
        if self.seen_after_s(begin_s) is None or not self.is_whole:
            return None
        return self.changes[-1][0] - begin_s

    async def until_seen(self, begin_s: float, timeout_s: float) -> bool:
        """Wait until a fault is seen; return False after the timeout."""
        return await self._until(lambda: self.seen_after_s(begin_s) is not None, timeout_s)

    async def until_whole(self, timeout_s: float) -> bool:
        """Wait until all engines are ready; return False after the timeout."""
        return await self._until(lambda: self.is_whole, timeout_s)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True


async def is_whole(client: httpx.AsyncClient) -> bool:
    """Return whether all engines of a server are ready. One that does not answer is not whole."""
    try:
        response = await client.get("/health", timeout=_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    if response.is_error:
        return False
    health = response.json()
    return bool(health["status"] == "ready" and health["num_replicas_ready"] == health["num_replicas"])
