"""The standard health protocol of gRPC, `grpc.health.v1`, for the state of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moeflow.server.service import Service

WATCH_S: Final = 0.25  # between two looks at the state, for a watching client
MAX_WATCHES: Final = 64  # at once: they need no key, and each takes the place of a call
_STATUS = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """SERVING while the server takes requests. It needs no key."""

    def __init__(self, service: Service, names: Iterable[str]) -> None:
        """`names` are those of gRPC services; the empty one stands for the server."""
        self._service = service
        self._names = frozenset(names)
        self._watches = 0

    async def Check(self, request: Any, context: Any) -> Any:
        """Return the state of a service."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service; there are {sorted(self._names)}")
        return _STATUS(status=self._status(request.service))

    async def List(self, request: Any, context: Any) -> Any:
        """Return the state of all services."""
        return health_pb2.HealthListResponse(
            statuses={name: _STATUS(status=self._status(name)) for name in self._names}
        )

    async def Watch(self, request: Any, context: Any) -> None:
        """Send the state of a service now and after each change, until the server shuts down."""
        if self._watches >= MAX_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} clients watch already; call Check instead"
            )
        self._watches += 1
        try:
            await self._watch(request, context)
        finally:
            self._watches -= 1

    async def _watch(self, request: Any, context: Any) -> None:
        sent = None
        while True:
            is_last = self._service.status == "draining"
            if (status := self._status(request.service)) != sent:
                await context.write(_STATUS(status=status))
                sent = status
            if is_last:
                return
            await asyncio.sleep(WATCH_S)

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return _STATUS.SERVICE_UNKNOWN
        return _STATUS.SERVING if self._service.status == "ready" else _STATUS.NOT_SERVING
