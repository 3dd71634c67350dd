from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import ollama
import pytest
from fastapi import FastAPI

from moeflow.text.tokenizer import Tokenizer
from tests.server.conftest import connect
from tests.server.conversing import Connect
from tests.server.fake_client import FakeClient
from tests.server.live_server import serve_in_thread
from tests.server.thinking_model import thinking_model


@contextmanager
def ollama_client(app: FastAPI) -> Iterator[ollama.Client]:
    """Serve the application in a thread, with Ollama's client before it."""
    with serve_in_thread(app) as url, ollama.Client(host=url) as client:
        yield client


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer, max_model_len=4096)


@pytest.fixture(scope="session")
def official() -> Connect:
    return ollama_client


@pytest.fixture
async def thinking_http() -> AsyncIterator[tuple[httpx.AsyncClient, FakeClient, Tokenizer]]:
    app, engine, tokenizer = thinking_model()
    async with connect(app) as http:
        yield http, engine, tokenizer
