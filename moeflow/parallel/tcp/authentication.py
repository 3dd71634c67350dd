"""Both ends of a new connection prove to each other that they have the cluster's token, without showing it.

The connecting end sends a nonce, receives one, and proves first. The accepting end proves only to an end that has
proved itself. A proof is an HMAC
over both nonces and the role, so it is of no use on another connection nor the other way round. Before it is proved,
a connection costs a few hundred bytes and a thread for a few seconds. Keys of the connection come from token and
nonces, one for each direction. Later data is authentic, not secret: an eavesdropper can read it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Final

from moeflow.core.errors import ConfigError, GroupError

_MAGIC: Final = b"moeflow ranks 1\n"  # the protocol and its version
_NONCE_BYTES: Final = 32
GREETING_BYTES: Final = len(_MAGIC) + _NONCE_BYTES  # first thing that a connecting process sends
_REFUSED: Final = bytes(32)  # instead of a proof; says nothing but that the other's is wrong


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """What authenticates the bytes of one connection."""

    sending: bytes
    receiving: bytes


def prove(connection: socket.socket, token: bytes, timeout_s: float) -> SessionKeys:
    """Authenticate a connection that this process has made.

    Blocks: at most `timeout_s`. Raises: ConfigError if the other end has another token or is no moeflow of this
    version; GroupError if it does not answer.
    """
    deadline_s = time.monotonic() + timeout_s
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, _MAGIC + nonce, deadline_s)
    greeting = _receive(connection, GREETING_BYTES, deadline_s)
    if not greeting.startswith(_MAGIC):
        raise ConfigError("what answers there is no moeflow that waits for ranks, or one of another version")
    nonces = nonce + greeting[len(_MAGIC) :]
    _send(connection, _digest(token, b"connecting", nonces), deadline_s)
    answer = _receive(connection, len(_REFUSED), deadline_s)
    if answer == _REFUSED:
        raise ConfigError("the token is refused: copy the head's token file to this machine")
    if not hmac.compare_digest(answer, _digest(token, b"accepting", nonces)):
        raise ConfigError("what answers there does not have the cluster's token")
    return SessionKeys(_digest(token, b"key to accepting", nonces), _digest(token, b"key to connecting", nonces))


def verify(connection: socket.socket, token: bytes, timeout_s: float) -> SessionKeys:
    """Authenticate a connection that this process has accepted.

    Blocks: at most `timeout_s`. Raises: GroupError if the other end does not prove that it has the token.
    """
    deadline_s = time.monotonic() + timeout_s
    greeting = _receive(connection, GREETING_BYTES, deadline_s)
    check_greeting(greeting)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = greeting[len(_MAGIC) :] + nonce
    _send(connection, _MAGIC + nonce, deadline_s)
    proof = _receive(connection, len(_REFUSED), deadline_s)
    if not hmac.compare_digest(proof, _digest(token, b"connecting", nonces)):
        _send(connection, _REFUSED, deadline_s)
        raise GroupError("it does not have the cluster's token")
    _send(connection, _digest(token, b"accepting", nonces), deadline_s)
    return SessionKeys(_digest(token, b"key to connecting", nonces), _digest(token, b"key to accepting", nonces))


def check_greeting(greeting: bytes) -> None:
    """Raises: GroupError if it is none, or not all of it is there."""
    if not greeting.startswith(_MAGIC[: len(greeting)]):
        raise GroupError("it does not speak the protocol of ranks, or another version of it")
    if len(greeting) < GREETING_BYTES:
        raise GroupError("it closed the connection before it was authenticated")


def _digest(token: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, _MAGIC + purpose + nonces, "sha256")  # nonces have a fixed length: nothing is ambiguous


def _send(connection: socket.socket, data: bytes, deadline_s: float) -> None:
    try:
        connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        connection.sendall(data)
    except OSError as error:
        raise _gone(error) from None


def _receive(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Return so many bytes; a byte now and then does not prolong the deadline."""
    data = b""
    while len(data) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise _gone(TimeoutError())
        try:
            connection.settimeout(left_s)
            piece = connection.recv(num_bytes - len(data))
        except OSError as error:
            raise _gone(error) from None
        if not piece:
            raise GroupError("it closed the connection before it was authenticated")
        data += piece
    return data


def _gone(error: OSError) -> GroupError:
    what = "does not answer in time" if isinstance(error, TimeoutError) else f"failed: {error.strerror}"
    return GroupError(f"authentication {what}")
