"""Only an open page makes the server's engine observe, and speeds are compared round by round."""

from __future__ import annotations

import pytest

from moeflow.core.errors import EngineError
from moeflow.core.observation import ExpertQuestion, TokenQuestion, Watch
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from studies.page_cost import Server, table, tokens_per_s
from tests.server.conftest import tokenizer
from tests.server.fake_client import REPLY, FakeClient
from tests.server.live_server import serve_in_thread
from tests.server.observed.test_experts import SIGHT

__all__ = ["tokenizer"]
NUM_TOKENS = len(REPLY.encode())


def test_a_closed_page_asks_nothing(tokenizer):
    client = FakeClient(tokenizer)
    with serve_in_thread(create_app(Generator(client, tokenizer), ServerConfig())) as url:
        assert tokens_per_s(Server(url, is_open=False), NUM_TOKENS // 2) > 0
    assert client.questions == []


def test_an_open_page_asks_for_experts_and_tokens(tokenizer):
    client = FakeClient(tokenizer)
    client.sights = {0: SIGHT}
    with serve_in_thread(create_app(Generator(client, tokenizer), ServerConfig())) as url:
        assert tokens_per_s(Server(url, is_open=True), NUM_TOKENS // 2) > 0
    assert {type(question) for question in client.questions} >= {Watch, ExpertQuestion, TokenQuestion}


def test_an_open_page_without_answers_is_an_error(tokenizer):
    client = FakeClient(tokenizer)
    app = create_app(Generator(client, tokenizer), ServerConfig())
    with serve_in_thread(app) as url, pytest.raises(EngineError, match="/stats/experts answers 503"):
        tokens_per_s(Server(url, is_open=True), NUM_TOKENS // 2)


def test_ratios_are_those_of_rounds():
    speeds = {"closed": [10.0, 20.0, 30.0], "open": [9.9, 19.8, 29.7]}
    rows = {row[0]: row[1:] for row in table({"tokens_per_s": speeds, "tokens": 5, "rounds": 3}).rows}
    assert rows == {"closed": ("20.00 ± 10.00", ""), "open": ("19.80 ± 9.90", "-1.00% ± 0.00%")}
