"""CurveZMQ keys of both ends of a connection, derived from the cluster token.

A connecting process must know the accepting end's public key, and show that it has the connecting end's secret key.
Both come from the token. Session keys are new for each connection, so a recording stays secret if the token leaks.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import zmq
from zmq.utils import z85


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One end's keys, in Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The keys of one cluster."""

    accepting: KeyPair
    connecting: KeyPair

    @classmethod
    def of(cls, token: bytes) -> CurveKeys:
        """Derive the keys of a token."""
        return cls(_pair(token, b"accepting"), _pair(token, b"connecting"))


def _pair(token: bytes, role: bytes) -> KeyPair:
    secret = z85.encode(hmac.digest(token, b"moeflow ranks: key of the end that is " + role, "sha256"))
    return KeyPair(zmq.curve_public(secret), secret)
