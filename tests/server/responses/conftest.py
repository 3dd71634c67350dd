from __future__ import annotations

import pytest

from moeflow.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer, max_model_len=4096)
