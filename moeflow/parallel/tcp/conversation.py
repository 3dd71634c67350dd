"""Messages of two processes that take turns: each says one of a few, and may refuse instead, with a reason.

The caller defines the messages. Each has a tag; anything else is an error.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from moeflow.core.errors import GroupError
from moeflow.parallel.tcp.link import Link

ANSWER_S: Final = 60.0  # for an answer of the other end


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why it comes to nothing."""

    reason: str
    may_retry: bool = False  # it may be otherwise later


class RefusedError(GroupError):
    """The other end has refused."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.may_retry = refusal.may_retry


Expected = TypeVar("Expected", bound=msgspec.Struct)


def say(link: Link, name: str, message: msgspec.Struct) -> None:
    """Send a message of a conversation."""
    link.send_message(name, msgspec.msgpack.encode(message))


def hear(
    link: Link, name: str, expected: type[Expected], others: object, timeout_s: float | None = ANSWER_S
) -> Expected:
    """Return the next message of a conversation; `others` is the union of all that it has.

    Blocks: until it is there. Raises: RefusedError; GroupError if it is another one, or does not come in time.
    """
    data = link.receive_message(name, timeout_s)
    try:
        message: msgspec.Struct = msgspec.msgpack.decode(data, type=others)
    except msgspec.DecodeError as error:
        raise GroupError(f"{link.peer} sends a message that this version does not understand: {error}") from None
    if isinstance(message, Refusal):
        raise RefusedError(message)
    if not isinstance(message, expected):
        raise GroupError(f"{link.peer} says {type(message).__name__} where {expected.__name__} is expected")
    return message
