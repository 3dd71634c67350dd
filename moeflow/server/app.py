"""Assembles the server: endpoints, guards, error objects, the page. Knows no process and no socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from moeflow.engine.generator import Generator
from moeflow.server.api import (
    batches,
    experts,
    files,
    lm_studio,
    model_changes,
    models,
    replicas,
    request_stories,
    server_log,
    speed,
    status,
    timeline,
    tokenize,
)
from moeflow.server.api.chat import chat
from moeflow.server.api.chat.chat_objects import ChatChunk
from moeflow.server.api.completions import completions
from moeflow.server.api.completions.completion_objects import CompletionChunk
from moeflow.server.api.messages import messages
from moeflow.server.api.messages.message_object import MESSAGE_EVENTS
from moeflow.server.api.ollama import chat as ollama_chat
from moeflow.server.api.ollama import embed as ollama_embed
from moeflow.server.api.ollama import generate as ollama_generate
from moeflow.server.api.ollama import models as ollama_models
from moeflow.server.api.ollama import pull as ollama_pull
from moeflow.server.api.ollama import refused as ollama_refused
from moeflow.server.api.ollama.pull import OllamaPullLine
from moeflow.server.api.openapi import ERRORS, complete_document
from moeflow.server.api.pooling import classification, embeddings, scores
from moeflow.server.api.responses import responses
from moeflow.server.api.responses.response_object import RESPONSE_EVENTS
from moeflow.server.config import ServerConfig
from moeflow.server.errors import add_error_handlers
from moeflow.server.guard.auth import api_key_check
from moeflow.server.guard.hosts import host_check
from moeflow.server.guard.origins import origin_check
from moeflow.server.guard.refusal import Guard
from moeflow.server.jobs.data_folder import Jobs
from moeflow.server.model_pool import ModelPool
from moeflow.server.page import add_page
from moeflow.server.request_log import RequestLog, RequestRecord
from moeflow.server.response_store import Conversations
from moeflow.server.service import Service

_CORS: Any = {
    "allow_methods": ("GET", "HEAD", "POST", "DELETE"),
    "allow_headers": ("*",),  # clients send many of their own
    "allow_private_network": True,  # the origin is trusted by name, wherever it comes from
    "expose_headers": ("x-request-id", "request-id", "retry-after", "x-moeflow-left-out"),
}  # no credentials: keys are in headers, and there are no cookies


class Application(FastAPI):
    """FastAPI with the request log around everything, so that answers to failures have an id and a line, too.

    Likewise, pages of allowed origins can read all answers.
    """

    on_request_end: Sequence[Callable[[RequestRecord], None]] = ()
    cors_origins: tuple[str, ...] = ()

    def build_middleware_stack(self) -> ASGIApp:
        """Put the log and CORS around FastAPI's own stack."""
        app = super().build_middleware_stack()
        if self.cors_origins:
            app = CORSMiddleware(app, self.cors_origins, **_CORS)
        return RequestLog(app, self.on_request_end)


def create_app(
    generator: Generator | None,
    config: ServerConfig,
    on_request_end: Callable[[RequestRecord], None] | None = None,
    *,
    pool: ModelPool | None = None,
    conversations: Conversations | None = None,
) -> FastAPI:
    """Return the ASGI application. Without a generator it answers "loading" until one is attached, or else
    serves those of `pool`, which are loaded as they are asked for.

    `on_request_end` gets the record of each finished request. `conversations`: see `Service`.

    Its `state.service` is where to attach one, and where to begin draining; `state.jobs` is where batch jobs are to
    be attached, which need a data folder.
    """
    # The pages that FastAPI makes for documents load scripts from elsewhere; the document itself stays.
    app = Application(title="moeflow", version="1", docs_url=None, redoc_url=None, responses=ERRORS)
    app.cors_origins = config.cors_origins
    service = app.state.service = Service(config, pool, conversations)
    noting = (service.metrics.requests.note, service.stories.end)
    app.on_request_end = [*noting, *([on_request_end] if on_request_end else [])]
    jobs: Jobs | None = None
    app.state.jobs = jobs
    if generator is not None:
        service.attach(generator)
    key_in_document = (
        []
        if not config.needs_key
        else [
            Security(HTTPBearer(auto_error=False)),
            Security(APIKeyHeader(name="x-api-key", auto_error=False)),
        ]
    )
    for part in (
        models,
        completions,
        chat,
        responses,
        messages,
        embeddings,
        classification,
        ollama_chat,
        ollama_generate,
        ollama_embed,
        ollama_models,
        ollama_pull,
        ollama_refused,
        lm_studio,
        scores,
        files,
        batches,
        tokenize,
        status,
        request_stories,
        experts,
        speed,
        timeline,
        replicas,
        model_changes,
        server_log,
    ):
        app.include_router(part.router, dependencies=key_in_document)
    complete_document(app, service, CompletionChunk, ChatChunk, OllamaPullLine, *RESPONSE_EVENTS, *MESSAGE_EVENTS)
    add_error_handlers(app)
    add_page(app)
    checks = [] if service.keys is None else [api_key_check(service.keys)]
    checks.append(origin_check(config))
    if config.is_loopback or config.allowed_hosts:
        checks.append(host_check(config))
    for check in checks:  # the last one added comes first
        app.add_middleware(Guard, check=check, metrics=service.metrics)
    return app
