"""Several asyncio streams as one, in order of arrival. Knows nothing of what flows in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (number of the stream, item) as items arrive, until all streams have ended.

    Each of several streams is read as fast as it comes, not as fast as this one is. When one fails, or when this one is
    closed, all are closed before it ends.

    Raises: whatever a stream raises, after the items that came before.
    """
    if len(streams) == 1:  # as most requests have: no task, and no queue for every item
        async with aclosing(streams[0]) as items:
            async for item in items:
                yield 0, item
        return
    arrivals: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream) as items:
            async for item in items:
                arrivals.put_nowait((number, item))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    for task in pumps:
        task.add_done_callback(arrivals.put_nowait)
    try:
        num_open = len(pumps)
        while num_open:
            arrival = await arrivals.get()
            if isinstance(arrival, asyncio.Task):
                arrival.result()
                num_open -= 1
            else:
                yield arrival
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
