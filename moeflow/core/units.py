"""Byte counts as people write and read them."""

from __future__ import annotations

import re
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.truncated_repr import truncated_repr

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_ROUNDS_UP = 1 - 0.05 / KIB  # from where on a smaller unit would be written as 1024.0

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": 1024**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
}
_MAX_DIGITS: Final = 40  # of a size


def parse_bytes(text: str) -> int:
    """Read "4GiB", "500 MB", "2g" or "1048576" as a number of bytes.

    Bare letters (k, m, g, t) are binary, as in most tools that size memory.

    Raises: ConfigError if the text is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or len(match[1]) > _MAX_DIGITS:
        raise ConfigError(f"{truncated_repr(text)} is not a size in bytes; write it like 4GiB, 500MB or 1048576")
    size = int(float(match[1]) * factor)
    if size <= 0:
        raise ConfigError(f"{text!r} is not a positive size in bytes")
    return size


def format_seconds(seconds: float) -> str:
    """Write a time with three digits in the unit that people would choose: "12.5 ms", "89.9 s", "25.3 min", "3.5 h"."""
    for limit, factor, unit in ((0.9995, 1000, "ms"), (99.95, 1, "s"), (100 * 60, 1 / 60, "min")):
        if abs(seconds) < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def format_bytes(num_bytes: float) -> str:
    """Write a byte count in the largest binary unit that keeps it at 1 or above: "1.5 GiB"."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= factor * _ROUNDS_UP:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{int(num_bytes)} B"
