"""Messages between the processes that start ranks or engines by Ray: lines of JSON on their pipes, text to Ray itself.

The server's process -> `Connect` -> the process that speaks to Ray, <- `Connected`; `LaunchOrder` -> (Ray)
`RankOrder` -> a process on a node; back come `RankNews` and a `RankEnd`, and of all together `LaunchReport`s.
"""

from __future__ import annotations

import msgspec


class Connect(msgspec.Struct, frozen=True):
    """The Ray cluster."""

    address: str


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """The cluster answers."""

    own_address: str  # of this machine, as its other nodes know it


class RankOrder(msgspec.Struct, frozen=True):
    """What a process on a node joins."""

    host: str  # of the first rank, or of the server
    port: int
    token: str  # the cluster's, in hexadecimal digits
    num_threads: int
    keeps_engine: bool = False  # of a server; else it is a rank


class RankNews(msgspec.Struct, frozen=True, tag="news"):
    """Its end, in words."""

    text: str


class RankEnd(msgspec.Struct, frozen=True, tag="end"):
    """Why it has ended."""

    reason: str
    may_retry: bool = True  # another try may end otherwise
    is_released: bool = False  # it is no longer needed
    has_left: bool = False  # a signal has ended it: its node is about to go


class LaunchOrder(msgspec.Struct, frozen=True):
    """The number of ranks to start, their places, and the engine to join."""

    num_ranks: int  # the first one not counted; or engines
    shares_nodes: bool
    deadline_s: float  # for nodes to be available for all of them
    rank: RankOrder


class More(msgspec.Struct, frozen=True):
    """Start this number of further engines."""

    number: int


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
    number: int = 0  # of the rank, or of the engine that a node cannot have


RankMessage = RankNews | RankEnd
LaunchReport = Connected | Placed | Unplaced | RankProgress | RankRefused
