"""How the processes of one engine share a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Expert parallelism on one machine: each rank has a block of every layer's experts, and all else whole."""

    num_ranks: int
    timeout_s: float = 60.0  # that a rank waits for the others in a collective
