"""What crosses to the process that checks grammars and back."""

from __future__ import annotations

import msgspec


class CheckRequest(msgspec.Struct, frozen=True):
    """A grammar to check. It may refer to one that a user has written."""

    lark: str
    user_text: str = ""
    is_regex: bool = False  # the user's is a regular expression


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """It can be compiled; so it is to be handed to engines."""

    grammar: str


class GrammarRefused(msgspec.Struct, frozen=True, tag="refused"):
    """It cannot be compiled."""

    reason: str


class OutOfMemory(msgspec.Struct, frozen=True, tag="out_of_memory"):
    """It takes too much memory. The process ends after it."""


Reply = Accepted | GrammarRefused | OutOfMemory
