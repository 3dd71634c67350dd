"""How the processes of one engine share a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """Where ranks on other machines join, and who may."""

    host: str  # an address of this machine; 0.0.0.0: all of them
    port: int
    token_file: str  # has the cluster's token; made if it is not there
    timeout_s: float = 600.0  # that the first rank waits for the others to join


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Expert parallelism: each rank has a block of every layer's experts, and all else whole."""

    num_ranks: int
    timeout_s: float = 60.0  # that a rank waits for the others in a collective
    join: JoinConfig | None = None  # None: all ranks are processes of this machine; else all but the first join
