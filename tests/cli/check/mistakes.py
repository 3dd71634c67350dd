"""Changes of correct answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.cli.check.recorded import Mistake, Reply


def edit(change: Callable[[Any], object]) -> Mistake:
    """Change the JSON of whole answers."""

    def mistake(reply: Reply) -> None:
        if reply.media_type == "application/json":
            value = json.loads(reply.body)
            change(value)
            reply.body = json.dumps(value).encode()

    return mistake


def edit_success(change: Callable[[Any], object]) -> Mistake:
    """Change the JSON of whole answers that a model has generated."""

    def change_generated(value: Any) -> None:
        if value.keys() & {"choices", "content", "output"}:
            change(value)

    return edit(change_generated)


def edit_events(change: Callable[[list[Any]], object]) -> Mistake:
    """Change the list of the JSON of a stream's events."""

    def mistake(reply: Reply) -> None:
        if not reply.is_stream:
            return
        blocks = reply.body.decode().split("\n\n")
        data = [json.loads(block.partition("data: ")[2]) for block in blocks if "data: {" in block]
        is_named = "event: " in blocks[0]
        ends = ["data: [DONE]\n\n"] if "data: [DONE]" in blocks else []
        change(data)
        lines = [(f"event: {it['type']}\n" if is_named else "") + f"data: {json.dumps(it)}\n\n" for it in data]
        reply.body = "".join([*lines, *ends]).encode()

    return mistake


def when(holds: Callable[[Reply], object], mistake: Mistake) -> Mistake:
    """Make a mistake in some answers only."""

    def made(reply: Reply) -> None:
        if holds(reply):
            mistake(reply)

    return made


def status(code: int) -> Mistake:
    """Answer with another status."""

    def mistake(reply: Reply) -> None:
        reply.status = code

    return mistake


def drop(*names: str | int) -> Mistake:
    """Leave a field of generated answers out."""
    *path, last = names

    def change(value: Any) -> None:
        for name in path:
            value = value[name]
        del value[last]

    return edit_success(change)


def set_to(new: object, *names: str | int) -> Mistake:
    """Give a field of generated answers another value."""
    *path, last = names

    def change(value: Any) -> None:
        for name in path:
            value = value[name]
        value[last] = new

    return edit_success(change)


def each_choice(change: Any) -> Mistake:
    """Change each choice of a stream of chunks."""
    return edit_events(lambda events: [change(choice) for event in events for choice in event.get("choices", ())])


def swap(old: str, new: str) -> Mistake:
    """Replace a text everywhere."""

    def mistake(reply: Reply) -> None:
        reply.body = reply.body.replace(old.encode(), new.encode())

    return mistake


def asked(name: str, value: object = None) -> Any:
    """Whether the request has a field, perhaps of one value."""
    return lambda reply: name in reply.request() and (value is None or reply.request()[name] == value)
