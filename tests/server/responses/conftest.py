from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from fastapi import FastAPI

from moeflow.engine.generator import Generator
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.fake_client import FakeClient
from tests.server.live_server import serve_in_thread
from tests.server.thinking_model import thinking_model


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer, max_model_len=4096)


@pytest.fixture
def client(app: FastAPI) -> Iterator[openai.OpenAI]:
    with serve_in_thread(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def refusing(tokenizer: Tokenizer) -> Iterator[tuple[openai.OpenAI, FakeClient]]:
    """A server of which nothing is asked that it does, so that one is enough."""
    engine = FakeClient(tokenizer)
    app = create_app(Generator(engine, tokenizer), ServerConfig())
    with serve_in_thread(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client, engine


@pytest.fixture
def thinking() -> Iterator[tuple[openai.OpenAI, FakeClient, Tokenizer]]:
    app, engine, tokenizer = thinking_model()
    with serve_in_thread(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client, engine, tokenizer
