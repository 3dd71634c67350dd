"""Messages between a server and the keepers of its engines on other machines.

A keeper -> `Offer`; <- `Start`; then `Relayed` both ways, each followed by a frame with a message of the engine; at the
end `Ended` ->, and another `Offer`. `Beat` -> and <- `Alive` show that both ends are there. Each has the number of
messages before it, so that a broken connection loses none unnoticed. `Leaving` -> instead of offers: none follows.
"""

from __future__ import annotations

import msgspec

from moeflow.core.address import Address

BEAT_S = 0.4  # interval of signs of life
SILENT_S = 1.3  # a keeper that has been silent for so long is a problem: other engines get its requests
GONE_S = 10.0  # after so much silence, each end takes the other for gone
LOST_S = 20.0  # after so much silence, a connection is made anew: the system itself would try for a quarter hour


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """A place for an engine."""

    host: str  # name of the machine
    software: str  # results differ in bits between versions
    processor: str
    cpu_isa: str  # the best instruction set it has
    num_threads: int
    available_bytes: int  # of memory
    last_life: int = 0  # of the engine that was here last; 0: none
    group: str = ""  # the ranks of an engine have places of one group
    rank_address: Address = ("", 0)  # where its process can accept links of other ranks
    server: str = ""  # the server's host, as this machine knows it


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The keeper is there, and so is its engine if `engine_beat` grows."""

    life: int
    engine_beat: int
    number: int  # of relayed messages that the keeper has sent in this life
    problem: str = ""  # see `EngineHost.problem`
    activity: str = ""  # of the keeper, before the engine's process starts


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """The next frame is a message to the engine, or of the engine."""

    life: int
    number: int  # of the messages of this life in this direction: none is lost


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The engine's process has ended."""

    life: int
    reason: str  # empty: without an error
    is_from_outside: bool = False
    in_pass: dict[str, int] = {}


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The machine takes no further engine. Its user has ended the keeper."""

    life: int  # of the engine there, which computes until the server ends it; 0: none


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start an engine. The first relayed message has its configuration, with the server's paths."""

    life: int  # a number for this engine; messages of earlier ones are ignored
    fingerprint: str  # of the checkpoint


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The server is there."""

    life: int  # of the engine that it has here; 0: none
    number: int  # of relayed messages that it has sent to this engine


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End the engine."""

    life: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The server needs fewer machines: end."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The server cannot use this machine."""

    reason: str


FromKeeper = Offer | Beat | Relayed | Ended | Leaving
ToKeeper = Start | Alive | Relayed | Kill | Leave | Refused
