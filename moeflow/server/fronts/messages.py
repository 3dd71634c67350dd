"""Messages between a server and its fronts, and the link that has them: a pair of connected sockets.

A front gets `Settings` first and `Attached` once the model is loaded. Then requests go one way, their tokens the other.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec

from moeflow.core.engine_messages import Cancellation, ModelInfo, Submission, TokenOutput
from moeflow.engine.client import EngineState
from moeflow.server.config import ServerConfig
from moeflow.server.log_ring import LogLine
from moeflow.server.metric_sums import Count
from moeflow.server.stories.story import Story

_LENGTH_BYTES = 4
_BUFFER_BYTES = 1 << 20
Received = TypeVar("Received")


class Settings(msgspec.Struct, frozen=True, tag="settings"):
    """The first message to a front."""

    config: ServerConfig
    model_path: str  # with the tokenizer
    number: int  # of the front, from 1 on
    server_socket: str  # path of the server's own HTTP socket


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The model is loaded."""

    model: ModelInfo


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """The outputs of a pass for requests of this front."""

    outputs: list[TokenOutput]


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """No engine continues a request."""

    request_id: str
    reason: str


class State(msgspec.Struct, frozen=True, tag="state"):
    """The state of the engines, when it changes."""

    state: EngineState
    back_in_s: float
    model: ModelInfo  # its `max_num_seqs` follows the number of engines


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The answer to `Search`."""

    number: int
    lists: list[bytes] | None  # None: a part is missing
    num_containers: int = 0


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new requests."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Let answers get out, and end."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The front takes requests."""


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """A response to keep."""

    response: bytes  # JSON
    items: bytes
    previous_id: str | None


class Search(msgspec.Struct, frozen=True, tag="search"):
    """Ask for the conversation up to a response."""

    number: int
    response_id: str


class AskRunning(msgspec.Struct, frozen=True, tag="ask_running"):
    """Ask for the stories of what runs in a front."""

    number: int


class Running(msgspec.Struct, frozen=True, tag="running"):
    """The answer to `AskRunning`."""

    number: int
    stories: list[Story]


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The story of a request that is over."""

    story: Story


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """All that a front has counted so far."""

    counts: list[Count]


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """New lines of a front's log."""

    lines: list[LogLine]


ToFront = Settings | Attached | Tokens | Lost | State | Found | AskRunning | Drain | Stop
FromFront = Started | Submission | Cancellation | Stored | Search | Running | Told | Counts | Logged


class Link(Generic[Received]):
    """One end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder(enc_hook=str)  # of paths
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=lambda path, text: path(text))

    @classmethod
    async def open(cls, end: socket.socket, kind: Any) -> Link[Received]:
        """Return a link over a socket of a pair that receives messages of this kind."""
        return cls(*await asyncio.open_connection(sock=end, limit=_BUFFER_BYTES), kind)

    def send(self, message: ToFront | FromFront) -> None:
        """Send a message. Never waits; to an end that is gone it sends nothing."""
        data = self._encoder.encode(message)
        self._writer.writelines((len(data).to_bytes(_LENGTH_BYTES, "big"), data))

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of messages that the other end has not taken."""
        return self._writer.transport.get_write_buffer_size()

    async def receive(self) -> Received | None:
        """Return the next message; None: the other end is gone."""
        try:
            num_bytes = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            message: Received = self._decoder.decode(await self._reader.readexactly(num_bytes))
        except (EOFError, OSError):
            return None
        return message

    def close(self) -> None:
        """Close this end, after all messages."""
        self._writer.close()
