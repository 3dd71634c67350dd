"""Tells a lack of memory from other errors of libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from moeflow.core.errors import CapacityError

_WORDS: Final = ("out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed")


@contextmanager
def out_of_memory_as(message: str) -> Iterator[None]:
    """Raise a CapacityError with a message for a MemoryError of the block, or torch's RuntimeError for the same."""
    try:
        yield
    except MemoryError as error:
        raise CapacityError(message) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _WORDS):
            raise
        raise CapacityError(message) from error
