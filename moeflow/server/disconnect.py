"""Ends work when the client that asked for it is gone, whether it streams or waits.

An ASGI server reports it only to a reader, so a task reads concurrently to the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client closed its connection before the answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, cancelling it when the client goes.

    The request's body must have been read before: every further message is then a disconnect.

    Blocks: until work is done, or cancelled and unwound.
    Raises: ClientDisconnected; whatever `work` raises.
    """
    worker = asyncio.create_task(work)
    listener = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((worker, listener), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnected
        return worker.result()
    finally:
        for task in (worker, listener):
            task.cancel()
        await asyncio.gather(worker, listener, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
