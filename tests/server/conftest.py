from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.page import add_page
from moeflow.text.tokenizer import Tokenizer
from tests.server.checked_app import CheckedApp
from tests.server.conversing import Connect, openai_client
from tests.server.fake_client import FakeClient
from tests.server.thinking_model import thinking_model
from tests.tiny_mixtral import write_byte_tokenizer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def page_read_once() -> Iterator[None]:
    """Let all applications share the routes of the page: its files take most of the time to make an application."""
    page = FastAPI(openapi_url=None)
    add_page(page)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeflow.server.app.add_page", lambda app: app.router.routes.extend(page.routes))
        yield


@pytest.fixture(scope="session", autouse=True)
def documents_made_once() -> Iterator[None]:
    """Make FastAPI's OpenAPI document once for all applications with the same endpoints: it takes 0.7 s."""
    made: dict[tuple[object, ...], dict[str, Any]] = {}

    def get_once(*, routes: Sequence[BaseRoute], **settings: Any) -> dict[str, Any]:
        key = (repr(settings), *((it.path, *sorted(it.methods), it.include_in_schema) for it in all_routes(routes)))
        if key not in made:
            made[key] = get_openapi(routes=routes, **settings)
        return deepcopy(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastapi.applications.get_openapi", get_once)
        yield


def all_routes(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    """Yield what answers requests, also what FastAPI keeps inside included routers."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif hasattr(route, "original_router"):
            yield from route.original_router.routes


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer)


@pytest.fixture
def make_app(engine: FakeClient, tokenizer: Tokenizer) -> Callable[..., FastAPI]:
    def make(**config) -> FastAPI:
        return create_app(Generator(engine, tokenizer), ServerConfig(**config))

    return make


@pytest.fixture
def app(make_app: Callable[..., FastAPI]) -> FastAPI:
    return make_app()


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(app) as client:
        yield client


@pytest.fixture(scope="session")
def official() -> Connect:
    """Connects the client that the tests of a folder use."""
    return openai_client


@pytest.fixture
def client(app: FastAPI, official: Connect) -> Iterator[Any]:
    with official(app) as client:
        yield client


@pytest.fixture(scope="module")
def refusing(tokenizer: Tokenizer, official: Connect) -> Iterator[tuple[Any, FakeClient]]:
    """A server that refuses each request of its tests, so that one is enough."""
    engine = FakeClient(tokenizer)
    with official(create_app(Generator(engine, tokenizer), ServerConfig())) as client:
        yield client, engine


@pytest.fixture
def thinking(official: Connect) -> Iterator[tuple[Any, FakeClient, Tokenizer]]:
    """A server of a model that reasons."""
    app, engine, tokenizer = thinking_model()
    with official(app) as client:
        yield client, engine, tokenizer


def connect(app: FastAPI) -> httpx.AsyncClient:
    """A client of the application without sockets. A bug in the server shows as its 500, not as an exception."""
    return CheckingClient(app)


class CheckingClient(httpx.AsyncClient):
    """Leaving its block is an error if an answer was not what official clients expect."""

    def __init__(self, app: FastAPI) -> None:
        self._checked = CheckedApp(app)
        transport = httpx.ASGITransport(self._checked, raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://localhost")

    async def __aexit__(self, kind: type[BaseException] | None = None, *about: Any) -> None:
        await super().__aexit__(kind, *about)
        if kind is None:
            self._checked.require_no_problems()


async def assets_path(http: httpx.AsyncClient) -> str:
    """Return the path below which the page's document names its files."""
    document = (await http.get("/")).text
    (folder,) = set(re.findall(r'(?:src|href)="(assets/[0-9a-f]+)/', document))
    return f"/{folder}"
