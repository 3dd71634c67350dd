from __future__ import annotations

import pytest

from moeflow.text.tokenizer import Tokenizer
from tests.server.conversing import Connect, anthropic_client
from tests.server.fake_client import FakeClient


@pytest.fixture(scope="session")
def official() -> Connect:
    return anthropic_client


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer, max_model_len=4096)
