"""Messages of `moeflow.proto` as the JSON of the HTTP API, and back. The field names are the same."""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from moeflow.server.guard.strict_json import MAX_CONTAINERS, MAX_VALUES, JsonError

_TOKEN_IDS = "prompt_token_ids"


def request_body(kind: type[Message], raw: bytes, *, is_streamed: bool) -> bytes:
    """Parse a message and return the body of the equal HTTP request. Raises: JsonError."""
    try:
        request = kind.FromString(raw)
        _check_size(request)
        return _json(request, is_streamed=is_streamed)
    except (DecodeError, json_format.Error) as error:  # NaN has no JSON
        raise JsonError(f"the message is no JSON: {error}") from None


def _check_size(request: Message) -> None:
    """Count entries and inner messages: the conversion takes 30 µs for each message. Raises: JsonError."""
    num_values, inner = 0, [request]
    for message in inner:
        for _, value in message.ListFields():
            if isinstance(value, Message):
                inner.append(value)
            elif not isinstance(value, str | bytes | int | float):
                num_values += len(value)
                if num_values <= MAX_VALUES:
                    entries = value.values() if hasattr(value, "values") else value
                    inner += [entry for entry in entries if isinstance(entry, Message)]
        if num_values > MAX_VALUES or len(inner) > MAX_CONTAINERS:
            raise JsonError(
                f"the message holds more than {MAX_VALUES} values, or more than {MAX_CONTAINERS} messages; "
                "send several requests"
            )


def _json(request: Message, *, is_streamed: bool) -> bytes:
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
