"""Parts of one request that the server accepts without using them: for the answer's headers and the log.

A context variable carries them, since neither pydantic's validators nor the readers of messages know the request.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Literal

UnknownFields = Literal["refuse", "ignore"]
Images = Literal["refuse", "results", "placeholder"]  # results: a text in place of those in results of tools
MAX_NOTES: Final = 20  # of one request
_MAX_CHARACTERS: Final = 80  # of a note
_UNSAFE: Final = re.compile(r"[^\x20-\x2b\x2d-\x7e]")  # in a header that separates notes by commas


@dataclass(slots=True)
class LeftOut:
    """Of one request: how unknown fields and images are treated, and each part that was left out, once."""

    unknown_fields: UnknownFields = "refuse"
    notes: list[str] = field(default_factory=list)
    images: Images = "results"


_current: ContextVar[LeftOut | None] = ContextVar("left_out", default=None)


@contextlib.contextmanager
def noting(request: LeftOut) -> Iterator[None]:
    """Note parts of this request until the end of the block."""
    token = _current.set(request)
    try:
        yield
    finally:
        _current.reset(token)


def ignores_unknown_fields() -> bool:
    """Return whether unknown fields of the current request are left out, rather than refused."""
    request = _current.get()
    return request is not None and request.unknown_fields == "ignore"


def images() -> Images:
    """Return how images of the current request are treated."""
    return (_current.get() or LeftOut()).images


def leave_out(part: str) -> None:
    """Note a part of the current request that is left out, such as `tools[3] (web_search)`."""
    request = _current.get()
    note = _UNSAFE.sub("?", part[:_MAX_CHARACTERS].strip()) or "?"  # no header ends in a space
    if request is not None and note not in request.notes and len(request.notes) < MAX_NOTES:
        request.notes.append(note)
