"""A vector as bytes: float32, little-endian, as messages and the OpenAI API's base64 carry it."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def encode_embedding(numbers: Iterable[float]) -> bytes:
    """Return the bytes of a vector."""
    return _swapped(array("f", numbers)).tobytes()


def decode_embedding(data: bytes) -> list[float]:
    """Return the vector that bytes hold."""
    return _swapped(array("f", data)).tolist()


def _swapped(numbers: array[float]) -> array[float]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
