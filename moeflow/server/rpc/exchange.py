"""A gRPC call as an HTTP request inside this process: same keys, limits, log line, metrics, traces and errors."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import grpc
from starlette.types import ASGIApp, Message, Scope

from moeflow.server.errors import ApiError, as_api_error
from moeflow.server.request_log import CLIENT_CLOSED_REQUEST, record_of

logger = logging.getLogger(__name__)

_SENT = frozenset(("authorization", "x-api-key", "x-request-id", "traceparent", "tracestate"))
_RETURNED = frozenset((b"x-request-id", b"x-moeflow-left-out", b"retry-after"))
_ADDRESS = re.compile(r"ipv[46]:\[?(?P<host>[^\]]*)\]?:(?P<port>\d+)")
_CODES = {
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    CLIENT_CLOSED_REQUEST: grpc.StatusCode.CANCELLED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


def status_code(http_status: int) -> grpc.StatusCode:
    """Return the gRPC status of an HTTP status that is no success."""
    default = grpc.StatusCode.INVALID_ARGUMENT if http_status < 500 else grpc.StatusCode.INTERNAL
    return _CODES.get(http_status, default)


async def abort(context: Any, error: ApiError) -> None:
    """End a call with an error. Raises: grpc.aio.AbortError."""
    detail = error.body["error"]
    named = {"error-code": detail["code"], "error-param": detail["param"]}
    trailing = tuple(
        (name, value) for name, value in named.items() if value and value.isascii() and value.isprintable()
    )
    await context.abort(status_code(error.status_code), detail["message"], trailing)


async def exchange(
    app: ASGIApp,
    context: Any,
    path: str,
    read_body: Callable[[], Awaitable[bytes]],
    on_piece: Callable[[bytes], Awaitable[None]],
) -> ApiError | None:
    """Send a request to the application, and the pieces of its answer to `on_piece`. Return the error that ended it.

    The application checks the key and its limits before it asks for the body.
    A cancelled call, also by its deadline, ends like a request whose client disconnects.
    """
    scope = _scope(context, path)
    is_gone = asyncio.Event()
    unread = [read_body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": await unread.pop()(), "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if is_gone.is_set():
            return
        try:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name in _RETURNED]
                await context.send_initial_metadata([(name.decode(), value.decode()) for name, value in headers])
            elif message.get("body"):
                await on_piece(message["body"])
        except grpc.aio.BaseError:  # the client left while this was sent
            is_gone.set()

    answering = asyncio.ensure_future(app(scope, receive, send))
    try:
        await asyncio.shield(answering)
    except asyncio.CancelledError:
        is_gone.set()
        await asyncio.wait((answering,))
        raise
    except Exception as error:
        logger.error("a gRPC call failed", exc_info=error)
        return as_api_error(error)
    return _error_of(scope)


def _error_of(scope: Scope) -> ApiError | None:
    record = record_of(scope)
    error = record.error or (record.work and record.work.failure)
    return error if isinstance(error, ApiError) else None


def _scope(context: Any, path: str) -> Scope:
    given = [(name, value) for name, value in context.invocation_metadata() if name in _SENT]
    fixed = {"host": "localhost", "content-type": "application/json"}
    address = _ADDRESS.fullmatch(unquote(context.peer()))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "2",
        "scheme": "grpc",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in (*fixed.items(), *given)],
        "client": (address["host"], int(address["port"])) if address else None,
        "server": None,
    }
