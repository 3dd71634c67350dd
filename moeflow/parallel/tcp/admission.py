"""Admits connections of one cluster only: answers to requests of ZeroMQ's authentication protocol (ZAP 1.0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zmq.utils import z85

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
ZAP_DOMAIN: Final = b"moeflow"


def zap_answer(request: Sequence[bytes], admitted_key: bytes) -> list[bytes]:
    """Return the answer to a request. `admitted_key` is the public key of processes that may connect."""
    version, number, *_, key = request
    status = b"200" if key == z85.decode(admitted_key) else b"400"
    return [version, number, status, b"", b"", b""]
