from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from fastapi import FastAPI

from moeflow.engine.generator import Generator
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.fake_client import FakeClient
from tests.tiny_mixtral import write_byte_tokenizer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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


def connect(app: FastAPI) -> httpx.AsyncClient:
    """A client of the application without sockets. A bug in the server shows as its 500, not as an exception."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def assets_path(http: httpx.AsyncClient) -> str:
    """Return the path below which the page's document names its files."""
    document = (await http.get("/")).text
    (folder,) = set(re.findall(r'(?:src|href)="(assets/[0-9a-f]+)/', document))
    return f"/{folder}"
