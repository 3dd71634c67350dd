"""Spans of computation and waits: layers report them to a trace without knowing traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

COMPUTING = "experts"  # a trace's row of what a pass computes with experts, and of its waits for them
EXPERTS = "experts"  # the called function's first argument is a list of them
WAITS = "waits for experts"


class Spanned(Protocol):
    """Calls a function; a trace records its time."""

    def __call__(self, name: str, layer: int, function: Callable[..., T], /, *args: Any) -> T:
        """Return `function(*args)`."""


def untraced(name: str, layer: int, function: Callable[..., T], /, *args: Any) -> T:
    """Return `function(*args)` and record nothing."""
    return function(*args)
