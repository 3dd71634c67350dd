"""Requests as real agents send them, to models of three kinds of chat templates: each has a complete answer.

`tests/data/agents/CLIENT.jsonl` has one request a line. They come from real sessions (`scripts/try-agents --keep`),
or from a client's public source. Texts are our own; fields, types, and the numbers of tools and turns are the client's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.agents.scripted_server import MODEL, scripted_server
from tests.agents.templates import TEMPLATES
from tests.marks import thorough_unless
from tests.server.events import read_events, read_typed_events

RECORDED = Path(__file__).parents[2] / "data" / "agents"
ROWS = {
    f"{file.stem}-{row['name']}": row
    for file in sorted(RECORDED.glob("*.jsonl"))
    for row in map(json.loads, file.read_text().splitlines())
}
STRICTEST = "mistral"  # takes fewest orders of messages
ANSWER = "The fox is red."
LAST_EVENTS = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}


@pytest.fixture(scope="module", params=thorough_unless(lambda kind: kind == STRICTEST, TEMPLATES))
def http(request) -> Iterator[httpx.Client]:
    with (
        scripted_server(TEMPLATES[request.param], lambda _: ANSWER) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def streamed_text(path: str, body: str) -> str:
    """Return the text of a stream that ends as its protocol demands."""
    if path not in LAST_EVENTS:
        choices = [chunk["choices"][0] for chunk in read_events(body) if chunk["choices"]]
        assert choices[-1]["finish_reason"] == "stop"
        return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    events = read_typed_events(body)
    assert events[-1]["type"] == LAST_EVENTS[path]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    return "".join(
        deltas or [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
    )


@pytest.mark.parametrize("name", ROWS)
def test_answer(http, name):
    row = ROWS[name]
    response = http.post(row["path"], json=row["body"] | {"model": MODEL}, headers=row["headers"])
    assert response.status_code == 200, response.text
    path = row["path"].partition("?")[0]
    if row["body"].get("stream"):
        assert streamed_text(path, response.text) == ANSWER
    elif path.endswith("count_tokens"):
        assert response.json()["input_tokens"] > 0
    else:
        assert ANSWER in response.text


def test_rows_are_many_and_anonymous():
    assert len(ROWS) >= 60
    assert {name.partition("-")[0] for name in ROWS} >= {"codex", "claude", "opencode", "cline", "continue", "litellm"}
    for file in RECORDED.glob("*.jsonl"):
        text = file.read_text()
        assert not any(folder in text for folder in ("/home/", "/root/", "/tmp/", "/Users/"))
