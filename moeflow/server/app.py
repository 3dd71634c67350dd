"""Puts the server together: endpoints, guards, error objects, the page. Knows no process and no socket."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.types import ASGIApp

from moeflow.engine.generator import Generator
from moeflow.server.api import batches, files, models, status, tokenize
from moeflow.server.api.chat import chat
from moeflow.server.api.chat.chat_objects import ChatChunk
from moeflow.server.api.completions import completions
from moeflow.server.api.completions.completion_objects import CompletionChunk
from moeflow.server.api.messages import messages
from moeflow.server.api.messages.message_object import MESSAGE_EVENTS
from moeflow.server.api.openapi import ERRORS, complete_document
from moeflow.server.api.pooling import classification, embeddings
from moeflow.server.api.responses import responses
from moeflow.server.api.responses.response_object import RESPONSE_EVENTS
from moeflow.server.config import ServerConfig
from moeflow.server.errors import add_error_handlers
from moeflow.server.guard.auth import api_key_check
from moeflow.server.guard.hosts import host_check
from moeflow.server.guard.origins import origin_check
from moeflow.server.guard.refusal import Guard
from moeflow.server.jobs.data_folder import Jobs
from moeflow.server.page import add_page
from moeflow.server.request_log import RequestLog, RequestRecord
from moeflow.server.service import Service


class Application(FastAPI):
    """FastAPI with the request log around everything, so that answers to failures have an id and a line, too."""

    on_request_end: Callable[[RequestRecord], None] | None = None

    def build_middleware_stack(self) -> ASGIApp:
        """Put the log around what FastAPI builds."""
        return RequestLog(super().build_middleware_stack(), self.on_request_end)


def create_app(
    generator: Generator | None,
    config: ServerConfig,
    on_request_end: Callable[[RequestRecord], None] | None = None,
) -> FastAPI:
    """Return the ASGI application. Without a generator it answers "loading" until one is attached.

    `on_request_end` gets what is known of each request that is over.

    Its `state.service` is where to attach one, and where to begin draining; `state.jobs` is where batch jobs are to
    be attached, which need a data folder.
    """
    # The pages that FastAPI makes for documents load scripts from elsewhere; the document itself stays.
    app = Application(title="moeflow", version="1", docs_url=None, redoc_url=None, responses=ERRORS)
    app.on_request_end = on_request_end
    service = app.state.service = Service(config)
    jobs: Jobs | None = None
    app.state.jobs = jobs
    if generator is not None:
        service.attach(generator)
    key_in_document = (
        []
        if config.api_key is None
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
        files,
        batches,
        tokenize,
        status,
    ):
        app.include_router(part.router, dependencies=key_in_document)
    complete_document(app, service, CompletionChunk, ChatChunk, *RESPONSE_EVENTS, *MESSAGE_EVENTS)
    add_error_handlers(app)
    add_page(app)
    checks = [] if config.api_key is None else [api_key_check(config.api_key)]
    checks.append(origin_check(config))
    if config.is_loopback or config.allowed_hosts:
        checks.append(host_check(config))
    for check in checks:  # the last one added comes first
        app.add_middleware(Guard, check=check, metrics=service.metrics)
    return app
