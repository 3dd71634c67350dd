"""Why a handshake has failed, in words, from the events of ZeroMQ's monitor."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final, NamedTuple

import zmq

from moeflow.core.errors import ConfigError, GroupError, MoeflowError

_GREETING_BYTES: Final = 10  # ZMTP: what either end sends first
_LATE: Final = "authentication does not answer in time"
_GONE: Final = "it closed the connection before it was authenticated"
_NO_MOEFLOW: Final = "what answers there is no moeflow that waits for ranks, or one of another version"


class Failure(NamedTuple):
    """The last event of a connection that did not come about."""

    event: int
    value: int


def accepting_reason(failure: Failure | None) -> str:
    """Return why an accepted connection is refused."""
    if failure is None or failure.event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it does not have the cluster's token, or does not speak this version's protocol of ranks"
    return _LATE if failure.value == errno.EAGAIN else _GONE


def connecting_error(failure: Failure, where: str, address: tuple[str, int], timeout_s: float) -> MoeflowError:
    """Return the error of a failed connection to `where`. Blocks: for a while, to look what answers there."""
    if failure.event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return _token_refused(where)
    if failure.event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and failure.value == errno.EAGAIN:
        return GroupError(f"{where}: {_LATE}")
    if failure.event == zmq.EVENT_DISCONNECTED:
        return ConfigError(f"{where}: {_NO_MOEFLOW}")
    if failure.event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return _error_of_answer(where, address, timeout_s)
    try:
        socket.create_connection(address, timeout_s).close()
    except OSError as error:
        return GroupError(f"cannot connect to {where}: {error.strerror or error}")
    return GroupError(f"cannot connect to {where}: it has begun to listen only now")


def _error_of_answer(where: str, address: tuple[str, int], timeout_s: float) -> MoeflowError:
    """Look what answers there: an accepting end with another token closes the connection after its greeting."""
    try:
        connection = socket.create_connection(address, timeout_s)
    except OSError as error:
        return GroupError(f"cannot connect to {where}: {error.strerror or error}")
    greeting = b""
    with connection, contextlib.suppress(OSError):
        while len(greeting) < _GREETING_BYTES and (piece := connection.recv(_GREETING_BYTES - len(greeting))):
            greeting += piece
    if greeting.startswith(b"\xff") and greeting.endswith(b"\x7f"):
        return _token_refused(where)
    return ConfigError(f"{where}: {_NO_MOEFLOW}") if greeting else GroupError(f"{where}: {_GONE}")


def _token_refused(where: str) -> ConfigError:
    return ConfigError(f"{where}: the token is refused: copy the head's token file to this machine")
