"""Has the ranks of a group find each other: each connects to those before it and is found by those after it."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from moeflow.core.address import Address, format_address
from moeflow.core.errors import ConfigError, GroupError
from moeflow.parallel.tcp.endpoint import HANDSHAKE_S, Endpoint
from moeflow.parallel.tcp.link import Link

logger = logging.getLogger(__name__)

_MEETING: Final = "meeting"
_PAUSE_S: Final = 0.1  # between two attempts to connect, and two looks for links that arrive
_PATIENCE_S: Final = 10.0  # after which the log names the missing rank


def meet(
    own: int, addresses: Sequence[Address], endpoint: Endpoint, arrivals: queue.Queue[Link], timeout_s: float
) -> dict[int, Link]:
    """Return the links of rank `own` to all others, which listen at `addresses`.

    `arrivals` brings the links of ranks that connect to `endpoint`.

    Raises: GroupError if not all are found in time; then no link is left.
    """
    links: dict[int, Link] = {}
    deadline_s, notice = time.monotonic() + timeout_s, _Notice()
    try:
        for rank in range(own):
            links[rank] = _visit(rank, addresses[rank], endpoint, own, deadline_s, notice)
        while missing := [rank for rank in range(own + 1, len(addresses)) if rank not in links]:
            try:
                link = arrivals.get(timeout=_PAUSE_S)
            except queue.Empty:
                who = ", ".join(f"{rank} ({format_address(*addresses[rank])})" for rank in missing)
                if time.monotonic() <= deadline_s:
                    notice.look(who)
                    continue
                raise GroupError(f"rank {who} did not connect within {timeout_s:g} s: {_REMEDY}") from None
            _receive(link, missing, links)
    except BaseException:
        for link in links.values():
            link.close()
        raise
    for rank, link in links.items():
        link.peer = f"rank {rank} ({link.address})"
    return links


class _Notice:
    """Logs a missing rank once, if it takes long."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + _PATIENCE_S

    def look(self, missing: str) -> None:
        if time.monotonic() > self._due_s:
            self._due_s = math.inf
            logger.warning("waiting for rank %s: it may still get the model, or be out of reach", missing)


def _visit(rank: int, address: Address, endpoint: Endpoint, own: int, deadline_s: float, notice: _Notice) -> Link:
    """Connect to a rank, which may not listen yet."""
    while True:
        try:
            link = endpoint.connect(*address)
        except (GroupError, ConfigError) as error:
            if isinstance(error, ConfigError) or time.monotonic() > deadline_s:
                raise GroupError(f"rank {rank} is not found: {error}; {_REMEDY}") from None
            notice.look(f"{rank} ({format_address(*address)})")
            time.sleep(_PAUSE_S)
        else:
            link.send_message(_MEETING, msgspec.msgpack.encode(own))
            return link


def _receive(link: Link, missing: Sequence[int], links: dict[int, Link]) -> None:
    """Add a link that has arrived, if it is that of a missing rank."""
    try:
        rank = msgspec.msgpack.decode(link.receive_message(_MEETING, HANDSHAKE_S), type=int)
    except (GroupError, msgspec.DecodeError):
        rank = -1
    if rank in missing:
        links[rank] = link
    else:
        link.close()


_REMEDY: Final = "all machines of a cluster must be able to connect to each other"
