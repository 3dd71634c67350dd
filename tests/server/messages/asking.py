"""Requests for messages, as the official client sends them, and what to compare of the answers."""

from __future__ import annotations

from anthropic.types import Message

from tests.server.fake_client import NAME

ASK = [{"role": "user", "content": "Which fox?"}]
TOOLS = [
    {
        "name": "look",
        "description": "Looks it up.",
        "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
    {"name": "go", "input_schema": {"type": "object"}},
]


def asked(**changes):
    return {"model": NAME, "max_tokens": 1000, "messages": ASK, **changes}


def ask(client, **changes):
    return client.messages.create(**asked(**changes))


def streamed(client, **changes) -> Message:
    """What the client's own accumulator makes of a stream."""
    with client.messages.stream(**asked(**changes)) as stream:
        return stream.get_final_message()


def without_ids(message: Message) -> dict:
    fields = message.model_dump(exclude={"id"})
    for block in fields["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
        block.pop("citations", None)
        block.pop("caller", None)
        block.pop("toolset_name", None)
    return fields
