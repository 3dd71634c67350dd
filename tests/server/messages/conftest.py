from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest
from fastapi import FastAPI

from moeflow.text.tokenizer import Tokenizer
from tests.server.conversing import anthropic_client, refusing_server, thinking_server
from tests.server.fake_client import FakeClient


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer, max_model_len=4096)


@pytest.fixture
def client(app: FastAPI) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(app) as client:
        yield client


@pytest.fixture(scope="module")
def refusing(tokenizer: Tokenizer) -> Iterator[tuple[anthropic.Anthropic, FakeClient]]:
    with refusing_server(anthropic_client, tokenizer) as server:
        yield server


@pytest.fixture
def thinking() -> Iterator[tuple[anthropic.Anthropic, FakeClient, Tokenizer]]:
    with thinking_server(anthropic_client) as server:
        yield server
