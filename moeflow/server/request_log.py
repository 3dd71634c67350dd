"""One log line per request, written at its end: id, request, result, tokens and times.

Also gives each request its id, which every answer carries as `x-request-id`. A prompt is in the line only where the
server was configured so. A request that is part of a trace (W3C's `traceparent`) has its id there. Knows no OpenAI
object.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeflow.server.paths import API_PREFIXES, OTHER, endpoint_of, raw_api_path

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's number; the client is gone
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_TRACE_HEADERS = ("traceparent", "tracestate")
_PATH_CHARACTERS = 200  # that are logged
_ERROR_CHARACTERS = 500
_PROBES = frozenset(("/health", "/ready", "/version", "/api/version", "/metrics", "/stats", "/stats/experts"))
_POLLED = frozenset(("/v1/batches",))  # of the API: the page reads it again and again
_ID_HEADERS = (b"x-request-id", b"request-id")  # as OpenAI's clients read it, and Anthropic's
_LEFT_OUT_HEADER = b"x-moeflow-left-out"
_OWN_ID = re.compile(r"req_[0-9a-f]{32}")
_KEY = "moeflow.request_record"  # in the scope


class Failure(Protocol):
    """The error that ended a request; `ApiError` is one."""

    code: str
    param: str | None

    @property
    def detail(self) -> str:
        """The reason, for people."""


class GeneratedWork(Protocol):
    """The generation of a request. Times are on the clock of time.monotonic."""

    request_id: str  # of the answer's object
    is_batch: bool  # a line of a batch job
    num_sequences: int
    num_ahead: int  # sequences that were not finished when it was admitted
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    admitted_s: float
    queued_s: float | None  # in the engine's queue, until the first sequence's first pass
    begun_at_s: float | None  # when it was handed to the engine
    last_token_at_s: float | None
    ended_at_s: float | None  # when the last sequence ended
    slowest_gap_s: float | None  # between the tokens of two passes, of one sequence
    slowest_gap_at: int | None  # completion tokens before it

    @property
    def model_name(self) -> str:
        """The name of the model that generates."""

    @property
    def failure(self) -> Failure | None:
        """The error of a stream that ended early."""

    @property
    def first_token_at_s(self) -> float | None:
        """When the first token came."""

    @property
    def finish_reasons(self) -> list[str]:
        """Why sequences ended, each reason once."""


class SentKey(Protocol):
    """The key that a request was sent with."""

    name: str

    def end(self, record: RequestRecord) -> None:
        """Count a request out."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The record of one request so far."""

    request_id: str
    method: str = "-"
    path: str = "-"
    endpoint: str = OTHER  # its path in the API's document
    client: str | None = None
    account: SentKey | None = None  # None: no key was needed, or none was right
    started_s: float = field(default_factory=time.monotonic)
    status: int | None = None  # None: no answer was begun
    is_complete: bool = False  # whether the whole answer was handed to the connection
    error: Failure | None = None  # the answer's, if it is an error
    work: GeneratedWork | None = None
    prompt: Any = None  # only where prompts are logged
    trace_headers: dict[str, str] = field(default_factory=dict)  # W3C's, as the client sent them
    trace_id: str | None = None  # of the trace that the request is a part of
    left_out: list[str] = field(default_factory=list)  # parts of the request that the server does not use; ASCII

    @property
    def end(self) -> str:
        """Why the request ended: an error's code, `disconnected`, the reasons of its sequences, or `completed`."""
        if self.error is not None:
            return self.error.code
        if not self.is_complete or self.status == CLIENT_CLOSED_REQUEST:
            return "disconnected"
        if self.work is None:
            return "completed"
        return self.work.failure.code if self.work.failure else ",".join(self.work.finish_reasons)

    @property
    def level(self) -> int:
        """How much the line matters: probes and the page's files least."""
        if self.method == "OPTIONS" and (self.status or 0) < 400:
            return logging.DEBUG  # browsers ask so before a request of another origin
        is_quiet = self.path in _POLLED or not self.path.startswith(API_PREFIXES)
        is_read = self.method in ("GET", "HEAD") and is_quiet
        if self.path in _PROBES or (is_read and (self.status or 0) < 400):
            return logging.DEBUG
        has_failed_late = (self.error is not None and (self.status or 0) < 400) or (self.work and self.work.failure)
        return logging.WARNING if (self.status or 0) >= 500 or has_failed_late else logging.INFO

    def fields(self) -> dict[str, Any]:
        """Return the fields of the log line; fields that do not apply are omitted."""
        now_s, work = time.monotonic(), self.work
        error = self.error or (work and work.failure)
        fields: dict[str, Any] = {
            "id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status or CLIENT_CLOSED_REQUEST,
            "end": self.end,
            "error": error and error.detail[:_ERROR_CHARACTERS],
            "param": error and error.param and error.param[:_ERROR_CHARACTERS],
            "key": self.account and self.account.name,
            "trace_id": self.trace_id,
            "left_out": ",".join(self.left_out) or None,
        }
        if work is not None:
            first_s = work.first_token_at_s
            fields |= {
                "prompt_tokens": work.num_prompt_tokens,
                "cached_tokens": work.num_cached_tokens,
                "completion_tokens": work.num_completion_tokens,
                "queue_s": None if work.queued_s is None else round(work.queued_s, 4),
                "first_token_s": None if first_s is None else round(first_s - self.started_s, 4),
            }
        fields |= {"total_s": round(now_s - self.started_s, 4), "client": self.client, "prompt": self.prompt}
        return {name: value for name, value in fields.items() if value is not None}

    def log(self) -> None:
        """Write the line."""
        if logger.isEnabledFor(self.level):
            logger.log(self.level, "request", extra={"fields": self.fields()})


class RequestLog:
    """ASGI application around all others: gives a request its id and writes its line when it is over.

    Each of `on_end` gets the record before the line is written.
    """

    def __init__(self, app: ASGIApp, on_end: Iterable[Callable[[RequestRecord], None]]) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = _begin(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if record.status is None:  # else the connection has answered already
                    record.status = message["status"]
                request_id = record.request_id.encode()
                own = [(name, request_id) for name in _ID_HEADERS]
                if record.left_out:
                    own.append((_LEFT_OUT_HEADER, ", ".join(record.left_out).encode()))
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.is_complete = True

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.endpoint = endpoint_of(scope)
            if record.account is not None:
                record.account.end(record)
            for note in self._on_end:
                note(record)
            record.log()


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request with this scope; an unused one if none is kept."""
    record = scope.get(_KEY)
    return record if isinstance(record, RequestRecord) else RequestRecord("-")


def client_of(request: HTTPConnection) -> str:
    """Return the client of a request: the name of its API key, else its address; "" if neither is known."""
    account = record_of(request.scope).account
    if account is not None:
        return f"key {account.name}"
    return request.client.host if request.client else ""


def is_secret(request_id: str) -> bool:
    """Return whether an id is random, as the server makes them. Clients may choose others."""
    return _OWN_ID.fullmatch(request_id) is not None


def new_request_id() -> str:
    """Return an id that no other request has."""
    return f"req_{uuid.uuid4().hex}"


def _begin(scope: Scope) -> RequestRecord:
    """Start a record. A client's own id is kept if it is one that cannot disturb a log."""
    headers = Headers(scope=scope)
    given = headers.get("x-request-id", "")
    trace = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    client = scope.get("client")
    path = raw_api_path(scope)
    return RequestRecord(
        given if _GIVEN_ID.fullmatch(given) else new_request_id(),
        method=scope["method"],
        path=path.decode("ascii", "backslashreplace")[:_PATH_CHARACTERS],
        client=client[0] if client else None,
        trace_headers={name: headers[name] for name in _TRACE_HEADERS if name in headers} if trace else {},
        trace_id=trace[1] if trace else None,
    )
