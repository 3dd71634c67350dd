"""Messages between the processes that start ranks by Ray: lines of JSON on their pipes, text to Ray itself.

The server's process -> `LaunchOrder` -> the one that speaks to Ray -> (Ray) `RankOrder` -> a rank's process; back come
`RankNews` and a `RankEnd`, and of all ranks together `LaunchReport`s.
"""

from __future__ import annotations

import msgspec


class RankOrder(msgspec.Struct, frozen=True):
    """What a rank's process joins."""

    host: str  # of the first rank
    port: int
    token: str  # the cluster's, in hexadecimal digits
    num_threads: int


class RankNews(msgspec.Struct, frozen=True, tag="news"):
    """Its end, in words."""

    text: str


class RankEnd(msgspec.Struct, frozen=True, tag="end"):
    """Why it has ended."""

    reason: str
    may_retry: bool = True  # another try may end otherwise


class LaunchOrder(msgspec.Struct, frozen=True):
    """The number of ranks to start, their places, and the engine to join."""

    address: str  # of the Ray cluster
    num_ranks: int  # the first one not counted
    shares_nodes: bool
    deadline_s: float  # for nodes to be available for all of them
    rank: RankOrder


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """Every rank has a node."""

    nodes: list[str]


class Unplaced(msgspec.Struct, frozen=True, tag="unplaced"):
    """No rank is started."""

    reason: str
    lacks_nodes: bool = False  # what the cluster has does not suffice; else it is a setting that has to change


class RankProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A message for the log."""

    text: str


class RankRefused(msgspec.Struct, frozen=True, tag="refused"):
    """A rank cannot be one as it is set up."""

    reason: str


RankMessage = RankNews | RankEnd
LaunchReport = Placed | Unplaced | RankProgress | RankRefused
