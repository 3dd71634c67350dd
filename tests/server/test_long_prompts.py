"""What others feel while somebody sends long prompts, large documents, or talks to a template without end: nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable

import pytest

from moeflow.core.errors import QueueFullError
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.guard.large_bodies import LARGE_BYTES, MAX_LARGEST, LargeBodies
from moeflow.server.guard.strict_json import MAX_CONTAINERS, MAX_VALUES
from moeflow.text.tokenizer import Tokenizer
from tests.engine.fakes import byte_level_core, wrap
from tests.server.conftest import connect
from tests.server.fake_client import FakeClient
from tests.tiny_mixtral import write_byte_tokenizer

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The quick brown fox jumps over the lazy dog. "
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


async def turns_of_the_loop_beside(work: Awaitable) -> tuple[int, object]:
    """Return how often the event loop came round until the work was done, and what came of it."""
    task = asyncio.ensure_future(work)
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    return turns, await task


def app_with(tokenizer: Tokenizer, **limits):
    return create_app(Generator(FakeClient(tokenizer, **limits), tokenizer), ServerConfig())


@pytest.mark.slow
async def test_the_loop_goes_on_while_a_long_text_is_tokenized():
    app = app_with(wrap(byte_level_core(), eos_token="<|end|>"))
    async with connect(app) as http:
        turns, response = await turns_of_the_loop_beside(http.post("/tokenize", json={"prompt": TEXT * 20_000}))
    assert response.json()["count"] > 10**5
    assert turns > 50  # with the interpreter's lock held it would be a handful


@pytest.mark.slow
async def test_the_loop_goes_on_while_tokens_become_text():
    tokenizer = wrap(byte_level_core(), eos_token="<|end|>")
    turns, text = await turns_of_the_loop_beside(asyncio.to_thread(tokenizer.decode, [50] * 3_000_000))
    assert len(text) >= 3_000_000
    assert turns > 30


@pytest.mark.slow
async def test_the_loop_goes_on_while_a_template_loops(tmp_path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(LOOPS)
    async with connect(app_with(Tokenizer.load(tmp_path))) as http:
        chat = http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]})
        turns, response = await turns_of_the_loop_beside(chat)
        assert (await http.get("/health")).status_code == 200
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "chat_template_failed"
    assert "processor time" in response.json()["error"]["message"]
    assert turns > 100


async def test_a_template_that_fills_memory_is_an_error_object(tmp_path, http):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'x' * 4000000000 }}")
    async with connect(app_with(Tokenizer.load(tmp_path))) as http:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for path in (CHAT, "/tokenize"):
            response = await http.post(path, json=body)
            assert response.status_code == 500
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "chat_template_failed")
            assert "512 MiB" in error["message"]
        assert (await http.post(COMPLETIONS, json={"prompt": "hi"})).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_must_exceed_the_context_is_refused_before_it_is_tokenized(
    http, engine, tokenizer, path, monkeypatch
):
    text = "x" * (engine.model.max_model_len * 100)
    tokenizer.encode("is", max_tokens=1)  # learns how long tokens are, as there are more bytes than this
    monkeypatch.setattr(tokenizer, "_core", None)
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 256 tokens" in response.json()["error"]["message"]


async def test_a_tokenized_prompt_is_not_refused_for_its_length(http, tokenizer):
    response = await http.post("/tokenize", json={"prompt": "x" * 100_000})
    assert response.json()["count"] == 100_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[]," * MAX_CONTAINERS + b"[]]}",
        b'{"prompt": [' + b"7," * MAX_VALUES + b"7]}",
        b'{"prompt": [' + b'"",' * MAX_VALUES + b'""]}',
        b"{" + b",".join(b'"%d":0' % i for i in range(MAX_VALUES + 1)) + b"}",
        b'{"prompt": [' + b'"\\\\",' * MAX_VALUES + b'""]}',
    ],
    ids=["lists", "numbers", "strings", "keys", "strings with backslashes"],
)
async def test_documents_of_too_many_values_are_not_built(http, body):
    response = await http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert "holds more than" in response.json()["error"]["message"]


async def test_text_is_not_counted_as_structure(http, engine):
    text = '[{,"\\",' * 80_000
    response = await http.post("/tokenize", json={"prompt": text})
    assert response.json()["count"] == len(text)


async def test_a_large_request_is_answered_as_a_small_one(make_app, tokenizer):
    app = app_with(tokenizer, max_model_len=2 * LARGE_BYTES + 100)
    async with connect(app) as http:
        response = await http.post(COMPLETIONS, json={"prompt": "x" * (2 * LARGE_BYTES), "max_tokens": 2})
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == 2 * LARGE_BYTES


# Memory


def test_large_bodies_have_so_much_room_together():
    large = LargeBodies(1000)
    for _ in range(MAX_LARGEST):
        large.reserve(1000)
    with pytest.raises(QueueFullError, match="16000 bytes in all are under way"):
        large.reserve(1)
    large.release(1000)
    large.reserve(1000)


async def in_chunks(body: bytes):
    for start in range(0, len(body), 10_000):
        yield body[start : start + 10_000]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_large_body_waits_for_room_and_gives_it_back(app, is_chunked):
    large = app.state.service.large_bodies
    limit = app.state.service.config.max_body_bytes
    body = json.dumps({"prompt": "x" * (LARGE_BYTES + 1)}).encode()

    async def post(http):
        content = in_chunks(body) if is_chunked else body
        return await http.post("/tokenize", content=content, headers={"content-type": "application/json"})

    async with connect(app) as http:
        large.reserve(MAX_LARGEST * limit)
        refused = await post(http)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await http.post("/tokenize", json={"prompt": "small"})).status_code == 200
        large.release(MAX_LARGEST * limit)
        assert (await post(http)).status_code == 200
        large.reserve(MAX_LARGEST * limit)  # all of it is there again


async def test_refused_bodies_give_their_room_back(app):
    large, limit = app.state.service.large_bodies, app.state.service.config.max_body_bytes
    async with connect(app) as http:
        for content in (b"x" * (LARGE_BYTES + 1), b'{"prompt": 5' + b" " * LARGE_BYTES + b"}"):
            response = await http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
            assert response.status_code == 400
    large.reserve(MAX_LARGEST * limit)


async def test_large_documents_are_parsed_one_at_a_time(app, monkeypatch):
    at_once, most = 0, 0
    real = asyncio.to_thread

    async def count(function, *args):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        try:
            return await real(function, *args)
        finally:
            at_once -= 1

    monkeypatch.setattr(asyncio, "to_thread", count)
    async with connect(app) as http:
        posts = [http.post("/tokenize", json={"prompt": "x" * (LARGE_BYTES + 1)}) for _ in range(5)]
        answers = await asyncio.gather(*posts)
    assert [answer.status_code for answer in answers] == [200] * 5
    assert most == 1
