"""What crosses to the process that renders chat templates and back: msgpack, each message behind its length."""

from __future__ import annotations

import socket
import struct

import msgspec

_LENGTH = struct.Struct("<Q")
MAX_REASON = 500  # characters of what a template reports as wrong


class Opening(msgspec.Struct, frozen=True):
    """The first message: the template, and the names that it may use in addition to the messages."""

    template: str
    variables: dict[str, str]


class RenderRequest(msgspec.Struct, frozen=True):
    """A conversation to render, into so many bytes of UTF-8 at most."""

    messages: bytes  # a list, as JSON: arguments of calls may hold numbers of any size
    tools: str  # a list, as JSON
    variables: str  # an object, as JSON: names that the template may use, for this conversation
    max_bytes: int
    continues_last: bool  # the prompt ends with the content of the last message


class Rendered(msgspec.Struct, frozen=True, tag="rendered"):
    """The prompt."""

    text: str


class TooLong(msgspec.Struct, frozen=True, tag="too_long"):
    """The prompt has more bytes than are allowed."""

    num_bytes: int


class TemplateRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The template raised an error: it does not take these messages."""

    reason: str


class TemplateFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The template cannot be compiled, or needs too much memory. The process ends after it."""

    reason: str


Reply = Rendered | TooLong | TemplateRefused | TemplateFailed


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as it is sent."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def receive(connection: socket.socket, max_bytes: int | None = None) -> bytes | None:
    """Return the next message, not yet decoded; None if the other side is gone.

    Raises: OSError, also if the message is larger than allowed.
    """
    head = _read(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if max_bytes is not None and length > max_bytes:
        raise OSError(f"a message of {length} bytes where {max_bytes} are allowed")
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes | None:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = connection.recv_into(view[done:])
        if not count:
            return None
        done += count
    return bytes(data)
