"""Messages between the processes that start keepers by Ray: lines of JSON on their pipes, text to Ray itself.

The server sends `Connect` and a `LaunchOrder` to the process that speaks to Ray, which answers with `Connected` and
`LaunchReport`s. A keeper on a node gets a `KeeperOrder`, and answers with `KeeperNews` and a `KeeperEnd`.
"""

from __future__ import annotations

import msgspec


class Connect(msgspec.Struct, frozen=True):
    """The Ray cluster."""

    address: str


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """The cluster answers."""

    own_address: str  # of this machine, as its other nodes know it


class KeeperOrder(msgspec.Struct, frozen=True):
    """The server of a keeper."""

    host: str
    port: int
    token: str  # the cluster's, in hexadecimal digits
    num_threads: int
    group: str = ""  # keepers of an engine's ranks have the same


class KeeperNews(msgspec.Struct, frozen=True, tag="news"):
    """A change, in words."""

    text: str


class KeeperEnd(msgspec.Struct, frozen=True, tag="end"):
    """Why it has ended."""

    reason: str
    may_retry: bool = True  # another try may end otherwise
    is_released: bool = False  # it is no longer needed
    has_left: bool = False  # a signal has ended it: its node is about to go


class LaunchOrder(msgspec.Struct, frozen=True):
    """The number of keepers to start, and their places."""

    num_engines: int
    num_keepers: int  # of each engine: its ranks on nodes
    placement: str  # of these; see `RAY_PLACEMENTS`
    has_first_here: bool  # the first rank of the only engine is on this node, and it cannot start without the others
    deadline_s: float  # until the cluster must have places for these
    keeper: KeeperOrder


class More(msgspec.Struct, frozen=True):
    """Start this number of further engines."""

    number: int


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """Each rank has a node. Engines may wait for theirs."""

    nodes: list[str]  # of ranks


class Unplaced(msgspec.Struct, frozen=True, tag="unplaced"):
    """No keeper is started."""

    reason: str
    lacks_nodes: bool = False  # what the cluster has does not suffice; else it is a setting that has to change


class NodeLost(msgspec.Struct, frozen=True, tag="lost"):
    """Ray has lost a node."""

    address: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A message for the log."""

    text: str


class KeeperRefused(msgspec.Struct, frozen=True, tag="refused"):
    """A node cannot have an engine or a rank as it is set up."""

    reason: str
    number: int = 0  # of the rank, or of the engine that a node cannot have


KeeperMessage = KeeperNews | KeeperEnd
LaunchReport = Connected | Placed | Unplaced | Progress | KeeperRefused | NodeLost
