"""An event stays one line for clients that split a stream wherever `str.splitlines` does."""

from __future__ import annotations

import json

import pytest

from moeflow.server.sse import event
from tests.server.fake_client import NAME
from tests.tiny_mixtral import EOS

pytestmark = pytest.mark.anyio

LINE_ENDS = [chr(code) for code in range(0x110000) if len(f"a{chr(code)}b".splitlines()) > 1]
TEXT = "".join(f"{number}{end}" for number, end in enumerate(LINE_ENDS)) + "“ü”"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
STREAMS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 100},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 100, "model": NAME},
}


def text_of(chunk: dict) -> str:
    """Return the text that an event of any of the streams adds."""
    if chunk.get("type") == "response.output_text.delta":
        return chunk["delta"]
    if chunk.get("type") == "content_block_delta":
        return chunk["delta"]["text"]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "") for choice in chunk.get("choices", ())
    )


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_survives_a_client_that_splits_lines_as_python_does(http, engine, tokenizer, path):
    engine.reply = [*tokenizer.encode(TEXT, add_special_tokens=False), EOS]
    body = (await http.post(path, json=STREAMS[path] | {"stream": True})).text
    lines = [line for line in body.splitlines() if line]
    assert all(line.startswith(("data: ", "event: ", ":")) for line in lines)
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert "".join(text_of(json.loads(each)) for each in data if each != "[DONE]") == TEXT


def test_json_is_escaped_in_names_too_and_nothing_else_changes():
    payload = {TEXT: [TEXT, "\\\u2028", "\u2027\u202a\x84\xa0"]}
    encoded = event(payload).decode()
    assert encoded.splitlines() == [encoded.removesuffix("\n\n"), ""]
    assert json.loads(encoded.removeprefix("data: ")) == payload
    assert "“ü”" in encoded
