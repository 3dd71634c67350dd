"""Requests for responses, as the official client sends them, and what to compare of the answers."""

from __future__ import annotations

from openai.types.responses import Response

from tests.server.fake_client import NAME

TOOLS = [
    {
        "type": "function",
        "name": "look",
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
    {"type": "function", "name": "go"},
]


def ask(client, **changes):
    return client.responses.create(**{"model": NAME, "input": "Which fox?", **changes})


def without_ids(response: Response) -> dict:
    """What a response says, but for what differs each time."""
    fields = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in fields["output"]:
        del item["id"]
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return fields


def streamed(client, **changes) -> tuple[Response, list[str]]:
    """What the client's own accumulator makes of a stream, and the types of the events."""
    with client.responses.stream(**{"model": NAME, "input": "Which fox?", **changes}) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_response(), kinds
