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
        if not is_out_of_memory(error):
            raise
        raise CapacityError(message) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether a lack of memory led to an error of torch: to itself, or to one that it followed."""
    while error is not None:
        if any(words in str(error) for words in _WORDS):
            return True
        error = error.__context__
    return False
