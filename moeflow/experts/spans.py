"""How layers let a trace record what takes time, without knowing traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

EXPERTS = "experts"  # the first argument of what is called is which
WAITS = "waits for experts"


class Spanned(Protocol):
    """Calls a function; a trace records how long that takes."""

    def __call__(self, name: str, layer: int, function: Callable[..., T], /, *args: Any) -> T:
        """Return `function(*args)`."""


def untraced(name: str, layer: int, function: Callable[..., T], /, *args: Any) -> T:
    """Return `function(*args)` and record nothing."""
    return function(*args)
