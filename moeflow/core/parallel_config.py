"""How the processes of one engine share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExpertLayout = Literal["expert", "sliced"]  # each rank has a block of a layer's experts, or a slice of every expert
AttentionLayout = Literal["replicated", "tensor"]  # each rank has all heads, or a block of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The ranks of one machine: how experts are laid out over them, and how attention, dense layers and the head."""

    num_ranks: int
    expert_layout: ExpertLayout = "expert"
    moves_experts: bool = True  # whole ones, to other ranks while serving, as loads call for it
    num_redundant_experts: int = 0  # of each layer, that have a further home once loads are known
    attention_layout: AttentionLayout = "replicated"
    timeout_s: float = 60.0  # that a rank waits for the others in a collective
