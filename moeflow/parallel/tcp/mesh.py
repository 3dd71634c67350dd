"""Has the ranks of a group find each other: each connects to those before it and is found by those after it."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from moeflow.core.address import Address, format_address
from moeflow.core.errors import ConfigError, GroupError
from moeflow.parallel.tcp.endpoint import HANDSHAKE_S, Endpoint
from moeflow.parallel.tcp.link import Link

_MEETING: Final = "meeting"
_PAUSE_S: Final = 0.1  # between two attempts to connect


class Meeting(msgspec.Struct, frozen=True):
    """What a rank says first to one before it."""

    group_id: bytes
    rank: int


def meet(
    meeting: Meeting,
    addresses: Sequence[Address],
    endpoint: Endpoint,
    known: Mapping[int, Link],
    arrivals: queue.Queue[Link],
    timeout_s: float,
) -> dict[int, Link]:
    """Return the links to all others, as the rank of `meeting`; `addresses` are where each listens.

    `known` are links that `endpoint` has already; `arrivals` brings those of ranks that connect to it.

    Raises: GroupError, ConfigError if not all are found in time; then new links are closed, and `known` are not.
    """
    links = dict(known)
    deadline_s = time.monotonic() + timeout_s
    try:
        for rank in range(meeting.rank):
            if rank not in links:
                links[rank] = _visit(rank, addresses[rank], endpoint, meeting, deadline_s)
        while missing := [rank for rank in range(len(addresses)) if rank != meeting.rank and rank not in links]:
            try:
                link = arrivals.get(timeout=max(deadline_s - time.monotonic(), 0))
            except queue.Empty:
                who = ", ".join(f"{rank} ({format_address(*addresses[rank])})" for rank in missing)
                raise GroupError(f"rank {who} did not connect within {timeout_s:g} s: {_REMEDY}") from None
            _receive(link, meeting, missing, links)
    except BaseException:
        for rank, link in links.items():
            if rank not in known:
                link.close()
        raise
    for rank, link in links.items():
        link.peer = f"rank {rank} ({link.address})"
    return links


def _visit(rank: int, address: Address, endpoint: Endpoint, meeting: Meeting, deadline_s: float) -> Link:
    """Connect to a rank, which may not listen yet."""
    while True:
        try:
            link = endpoint.connect(*address)
        except (GroupError, ConfigError) as error:
            if isinstance(error, ConfigError) or time.monotonic() > deadline_s:
                raise GroupError(f"rank {rank} is not found: {error}; {_REMEDY}") from None
            time.sleep(_PAUSE_S)
        else:
            link.send_message(_MEETING, msgspec.msgpack.encode(meeting))
            return link


def _receive(link: Link, meeting: Meeting, missing: Sequence[int], links: dict[int, Link]) -> None:
    """Add a link that has arrived, if it is one of this group's."""
    try:
        theirs = msgspec.msgpack.decode(link.receive_message(_MEETING, HANDSHAKE_S), type=Meeting)
    except (GroupError, msgspec.DecodeError):
        link.close()
        return
    if theirs.group_id == meeting.group_id and theirs.rank in missing and theirs.rank > meeting.rank:
        links[theirs.rank] = link
    else:  # of a group that was
        link.close()


_REMEDY: Final = "all machines of a cluster must be able to connect to each other"
