"""What tests of all APIs of conversations share: servers behind official clients, and what models may write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import anthropic
import openai
from fastapi import FastAPI
from hypothesis import strategies as st

from moeflow.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.live_server import eventually, serve_in_thread

Connect = Callable[[FastAPI], AbstractContextManager[Any]]
ONE = '<tool_call>\n{"name": "look", "arguments": {"q": "the fox"}}\n</tool_call>'
PIECES = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "look", "arguments": ',
    '{"q": "ü"}',
    "}",
    "x",
    "\n",
    "<",
    '"',
    "[1]",
    ONE,
)


@contextmanager
def openai_client(app: FastAPI) -> Iterator[openai.OpenAI]:
    """Serve the application in a thread, with OpenAI's client before it."""
    with serve_in_thread(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@contextmanager
def anthropic_client(app: FastAPI) -> Iterator[anthropic.Anthropic]:
    """Likewise with Anthropic's client."""
    with serve_in_thread(app) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def prompt_of(engine: FakeClient, tokenizer: Tokenizer) -> str:
    """What the model was last asked."""
    return tokenizer.decode(engine.submissions[-1].prompt_token_ids)


def texts_of(*more: str) -> st.SearchStrategy[str]:
    """What a model may write: calls, parts of them, and what looks like it."""
    return st.lists(st.sampled_from((*PIECES, *more)), max_size=8).map("".join)


def check_closing_ends_the_work(stream: Any, engine: FakeClient, app: FastAPI) -> None:
    """Read two events of a stream whose model has paused, and close it."""
    next(iter(stream))
    next(iter(stream))
    stream.close()
    assert eventually(lambda: not engine.live and app.state.service.models.num_unfinished == 0)
