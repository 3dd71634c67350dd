from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from fastapi import FastAPI

from moeflow.text.tokenizer import Tokenizer
from tests.server.conversing import openai_client, refusing_server, thinking_server
from tests.server.fake_client import FakeClient


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer, max_model_len=4096)


@pytest.fixture
def client(app: FastAPI) -> Iterator[openai.OpenAI]:
    with openai_client(app) as client:
        yield client


@pytest.fixture(scope="module")
def refusing(tokenizer: Tokenizer) -> Iterator[tuple[openai.OpenAI, FakeClient]]:
    with refusing_server(openai_client, tokenizer) as server:
        yield server


@pytest.fixture
def thinking() -> Iterator[tuple[openai.OpenAI, FakeClient, Tokenizer]]:
    with thinking_server(openai_client) as server:
        yield server
