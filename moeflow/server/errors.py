"""Every failure as an OpenAI error object: `{"error": {"message", "type", "param", "code"}}`, and where Anthropic's
clients ask, as theirs: `{"type": "error", "error": {"type", "message"}}`. Ollama's clients get `{"error": message}`.

Endpoints and guards raise `ApiError` or one of core's errors; this file alone knows what that looks
like to a client. A message never repeats the client's input at length.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from moeflow.core.errors import ChatTemplateError, ContextLengthError, EngineError, QueueFullError, RequestError
from moeflow.server.api.schema.tagged import TAG
from moeflow.server.disconnect import ClientDisconnected
from moeflow.server.paths import api_path, matching_routes
from moeflow.server.request_log import CLIENT_CLOSED_REQUEST, record_of

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 500  # characters
_MAX_PARAM = 80
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Their client, told so, sends whole conversations instead.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_ANTHROPIC_PATH = "/v1/messages/"  # with or without the slash, and all below it
_OLLAMA_PATH = "/api/"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def _is_none(value: Any) -> bool:
    return value is None


class ErrorDetail(BaseModel):
    """What went wrong, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    n_prompt_tokens: Annotated[int | None, Field(exclude_if=_is_none)] = None  # of a prompt that is too long
    n_ctx: Annotated[int | None, Field(exclude_if=_is_none)] = None  # tokens of the context that it exceeds


class ErrorResponse(BaseModel):
    """Body of every answer that is not a success."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What went wrong, as Anthropic's clients read it."""

    type: str
    message: str
    details: dict[str, Any] | None = None  # for programs, of few errors


class AnthropicErrorResponse(BaseModel):
    """Body of every answer to Anthropic's clients that is not a success; also the event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None = None


class OllamaErrorResponse(BaseModel):
    """Body of every answer to Ollama's clients that is not a success; also the last line of a stream that fails."""

    error: str


class ApiError(HTTPException):
    """A refusal with an HTTP status, a code for programs and a reason for people."""

    def __init__(
        self,
        status_code: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, headers)
        self.code = code
        self.param = param
        self.numbers: dict[str, int] = {}  # of the error object besides, for programs

    @property
    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        default_type = "invalid_request_error" if self.status_code < 500 else "server_error"
        detail = ErrorDetail(
            message=self.detail[:_MAX_MESSAGE],
            type=_TYPES.get(self.status_code, default_type),
            param=self.param and self.param[:_MAX_PARAM],
            code=self.code,
        )
        return {"error": detail.model_dump() | self.numbers}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic's error object, which has no place for the field's name but in the message."""
        default_type = "invalid_request_error" if self.status_code < 500 else "api_error"
        error = {"type": _ANTHROPIC_TYPES.get(self.status_code, default_type), "message": self._named_detail}
        return {"type": "error", "error": error | ({"details": _NO_THREADS} if self.param == "thread" else {})}

    @property
    def ollama_body(self) -> dict[str, Any]:
        """Ollama's error object, which is a message alone."""
        return {"error": self.detail[:_MAX_MESSAGE] if self.status_code == 404 else self._named_detail}

    @property
    def _named_detail(self) -> str:
        """The reason, with the field's name before it."""
        detail, param = self.detail[:_MAX_MESSAGE], self.param and self.param[:_MAX_PARAM]
        return detail if param is None or detail.startswith(param) else f"{param}: {detail}"

    def response(self, scope: Scope | None = None) -> Response:
        """The whole HTTP answer, in the words of the API that the request with this scope is for; OpenAI's without."""
        body = self.body
        if scope is not None and f"{api_path(scope)}/".startswith(_ANTHROPIC_PATH):
            body = {**self.anthropic_body, "request_id": record_of(scope).request_id}
        elif scope is not None and api_path(scope).startswith(_OLLAMA_PATH):
            body = self.ollama_body
        return JSONResponse(body, self.status_code, headers=self.headers)


class PromptTooLongError(ApiError):
    """A prompt that the context cannot hold, in each API's words: by these, clients know when to shorten it."""

    def __init__(self, error: ContextLengthError) -> None:
        super().__init__(400, "context_length_exceeded", str(error), param=error.param)
        self.numbers = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.max_model_len}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic's error object. The maximum of a prompt is a token less than the context, for the answer."""
        num_prompt, most = self.numbers["n_prompt_tokens"], self.numbers["n_ctx"] - 1
        message = f"prompt is too long: {num_prompt} tokens > {most} maximum"
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def as_api_error(error: Exception) -> ApiError:
    """Translate any exception; an unexpected one becomes a 500 without details."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            retry_after = {"Retry-After": str(max(1, round(error.retry_after_s)))}
            return ApiError(429, "queue_full", str(error), headers=retry_after)
        case ContextLengthError():
            return PromptTooLongError(error)
        case ChatTemplateError():
            return ApiError(500, "chat_template_failed", str(error))
        case RequestError():
            return ApiError(400, "invalid_value", str(error), param=error.param)
        case EngineError():
            return ApiError(503, "engine_unavailable", str(error))
        case RequestValidationError():
            return _from_validation(error)
        case _:
            return ApiError(500, "internal_error", "The server failed on this request; its log has the details.")


def from_pydantic(error: ValidationError) -> ApiError:
    """Translate what pydantic reports of a JSON object as if it had been a request's body."""
    errors = error.errors(include_input=False, include_url=False)
    return _from_validation(RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors]))


def _from_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    path = _path(first["loc"][1:])  # [0] says "body"
    name = first.get("ctx", {}).get("field")
    param = ".".join(part for part in (path, name) if part) or None
    message = first["msg"] if first["type"] == "refused" or not path else f"{path}: {first['msg']}"
    return ApiError(400, "invalid_value", message, param=param)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") as "messages[0].role"; names of a union's members are left out."""
    text = ""
    for part in location:
        if isinstance(part, str) and part.startswith(TAG):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def allowed_methods(request: Request) -> list[str]:
    """Return all methods of a request's path; the router names only those of one route of several.

    A path that is one by itself, though it looks like the name of something in another one, has its own alone.
    """
    matching = matching_routes(request.scope)
    routes = [route for route in matching if route.path == matching[0].path]
    scopes = [{**request.scope, "method": method} for method in _METHODS]
    return [scope["method"] for scope in scopes if any(route.matches(scope)[0] is Match.FULL for route in routes)]


def add_error_handlers(app: FastAPI) -> None:
    """Make the application answer every failure with an error object."""

    async def answer(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        if isinstance(error, ChatTemplateError):
            logger.error("%s", error)  # the operator can fix it
        request.app.state.service.metrics.count_refusal(api_error)
        record_of(request.scope).error = api_error
        return api_error.response(request.scope)

    async def no_such_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {api_path(request.scope)[:80]}"
        code = _HTTP_CODES.get(error.status_code, "http_error")
        headers = {"Allow": ", ".join(allowed_methods(request))} if error.status_code == 405 else error.headers
        api_error = record_of(request.scope).error = ApiError(error.status_code, code, message, headers=headers)
        return api_error.response(request.scope)

    async def nobody_listens(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for kind in (ApiError, RequestError, ChatTemplateError, EngineError, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, no_such_route)
    for gone in (ClientDisconnected, ClientDisconnect):  # while it waited; while it sent
        app.add_exception_handler(gone, nobody_listens)
