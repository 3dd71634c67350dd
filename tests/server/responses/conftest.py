from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from fastapi import FastAPI

from moeflow.engine.text.tokenizer import Tokenizer
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


@pytest.fixture
def thinking() -> Iterator[tuple[openai.OpenAI, FakeClient, Tokenizer]]:
    app, engine, tokenizer = thinking_model()
    with serve_in_thread(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client, engine, tokenizer
