"""How the processes of one engine share a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Expert parallelism on one machine: each rank has some of every layer's experts, and all else whole."""

    num_ranks: int
    moves_experts: bool = True  # to other ranks while serving, as loads call for it
    num_redundant_experts: int = 0  # of each layer, that have a further home once loads are known
    timeout_s: float = 60.0  # that a rank waits for the others in a collective
