"""Questions about an engine's passes, and its answers: plain data, as all that goes in and out of an engine.

A question also makes the engine observe its passes for the next `LEASE_S`. Without questions it observes nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec

LEASE_S: Final = 60.0  # an engine observes so long after a question


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Asks for nothing: it only makes the engine observe."""


Question = Watch


class Watching(msgspec.Struct, frozen=True, tag="watching"):
    """The answer to `Watch`."""

    observed_s: float  # since the engine began to observe


Sight = Watching
