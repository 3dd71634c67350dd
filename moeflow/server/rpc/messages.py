"""Messages of `moeflow.proto` as the JSON of the HTTP API, and back. The field names are the same."""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message

_TOKEN_IDS = "prompt_token_ids"


def request_body(request: Message, *, is_streamed: bool) -> bytes:
    """Return the body of the HTTP request that a message stands for. Raises: json_format.Error for NaN."""
    fields = json_format.MessageToDict(request, preserving_proto_field_name=True)
    if "seed" in fields:
        fields["seed"] = int(fields["seed"])  # protobuf writes 64-bit integers as strings
    if _TOKEN_IDS in fields:
        fields["prompt"] = fields.get("prompt", []) + [one.get("ids", []) for one in fields.pop(_TOKEN_IDS)]
    return msgspec.json.encode({**fields, "stream": is_streamed})


def answer_message(kind: type[Message], body: dict[str, Any]) -> Message:
    """Return an answer or a chunk as a message."""
    return json_format.ParseDict(body, kind(), ignore_unknown_fields=True)


def streamed_objects(piece: bytes) -> list[dict[str, Any]]:
    """Return the chunks in a piece of whole events, without errors, pings and the end."""
    events = [event for event in piece.split(b"\n\n") if event.startswith(b"data: {")]
    chunks: list[dict[str, Any]] = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    return [chunk for chunk in chunks if "error" not in chunk]
