"""Reads request bodies: only JSON, only so many bytes (also when no length is announced), parsed strictly.

Large ones are parsed one at a time in a thread, and their total memory is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from moeflow.core.errors import QueueFullError
from moeflow.core.units import format_bytes
from moeflow.server.api.schema.left_out import LeftOut, noting
from moeflow.server.errors import ApiError, as_api_error
from moeflow.server.guard import strict_json
from moeflow.server.guard.large_bodies import LARGE_BYTES, LargeBodies
from moeflow.server.request_log import record_of


class JsonRequest(Request):
    """A request whose body, if it is read, must be JSON within the server's limit."""

    num_reserved = 0  # bytes of what large bodies may take

    async def body(self) -> bytes:
        """Read the body once. Raises: ApiError 413, 415, or 400 for an empty one."""
        if not hasattr(self, "_body"):
            self._check_head()
            self._body = await self._read()
        return self._body

    async def json(self) -> Any:
        """Parse the body once. Raises: ApiError 400 with the reason."""
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = await self.large.read(len(body), strict_json.parse, body)
            except strict_json.JsonError as error:
                raise ApiError(400, "invalid_json", str(error)) from None
        return self._json

    def release(self) -> None:
        """Release the reservation of a large body."""
        self.large.release(self.num_reserved)
        self.num_reserved = 0

    @property
    def large(self) -> LargeBodies:
        """What all requests with large bodies share."""
        large: LargeBodies = self.app.state.service.large_bodies
        return large

    @property
    def _limit(self) -> int:
        return int(self.app.state.service.config.max_body_bytes)

    def _check_head(self) -> None:
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            had = f"not {media_type[:80]}" if media_type else "but none was given"
            raise ApiError(415, "unsupported_media_type", f"Content-Type must be application/json, {had}")
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._limit:
            raise self._too_large()
        if length.isdecimal() and int(length[:20]) > LARGE_BYTES:
            self._reserve(int(length))

    def _reserve(self, num_bytes: int) -> None:
        try:
            self.large.reserve(num_bytes)
        except QueueFullError as error:  # FastAPI turns other exceptions into a plain 400
            raise as_api_error(error) from None
        self.num_reserved = num_bytes

    async def _read(self) -> bytes:
        body = bytearray()
        async for chunk in self.stream():
            body += chunk
            if len(body) > self._limit:
                raise self._too_large()
            if len(body) > LARGE_BYTES and not self.num_reserved:
                self._reserve(self._limit)  # its length was not announced
        if not body:
            raise ApiError(400, "invalid_json", "the body is empty; send a JSON object")
        if self.num_reserved:
            self.large.release(self.num_reserved - len(body))
            self.num_reserved = len(body)
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, "body_too_large", f"the body is larger than {format_bytes(self._limit)}, the server's limit"
        )


def keep_reserved(request: Request, work: asyncio.Future[Any]) -> None:
    """Keep what a request's large body reserves, which this work holds, until the work is done."""
    if isinstance(request, JsonRequest) and request.num_reserved:
        work.add_done_callback(partial(_release, request.large, request.num_reserved))
        request.num_reserved = 0


def _release(large: LargeBodies, num_bytes: int, work: asyncio.Future[Any]) -> None:
    large.release(num_bytes)


class JsonRoute(APIRoute):
    """Gives endpoints `JsonRequest`s; FastAPI then reads their bodies through it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive)
            kept, config = record_of(request.scope).left_out, request.app.state.service.config
            try:
                with noting(LeftOut(config.unknown_fields, kept, config.images)):
                    return await handle(json_request)
            finally:
                json_request.release()

        return handle_json
