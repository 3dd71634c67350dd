"""Server-sent events of a whole stream, held against the rules of their framing."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from moeflow.cli.check.outcome import Failed, expect
from moeflow.core.stream_lines import stream_lines

_FIELDS = ("data", "event", "id", "retry")
DONE = "[DONE]"


class Event(msgspec.Struct):
    """One event; `name` is that of its line `event:`."""

    name: str | None
    data: str

    def value(self) -> dict[str, Any]:
        """Return its JSON. Raises: Failed if it is no object."""
        try:
            value = json.loads(self.data)
        except ValueError as error:
            raise Failed(f"the data of an event must be JSON ({error}): {self.data[:80]!r}") from None
        expect(isinstance(value, dict), f"the data of an event must be an object, not {self.data[:80]!r}")
        return dict(value)


def parse_events(body: bytes) -> list[Event]:
    """Return the events of a stream. Raises: Failed if it breaks the framing."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Failed(f"a stream must be UTF-8: {error}") from None
    events: list[Event] = []
    name, data = None, list[str]()
    for line in stream_lines([text]):
        if not line:
            events += [Event(name, "\n".join(data))] if data else []
            name, data = None, []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        expect(field in _FIELDS or line.startswith(":"), f"a line must begin with a field of an event: {line[:80]!r}")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    expect(not data, "the last event must end with an empty line")
    return events


def check_done(events: list[Event]) -> None:
    """Raise: Failed unless the last event of a stream of chunks, and no other, is `[DONE]`."""
    done = [number for number, event in enumerate(events) if event.data == DONE]
    last = events[-1].data if events else "nothing"
    expect(done == [len(events) - 1], f"a stream must end with one `data: {DONE}`, not {last[:200]!r}")
