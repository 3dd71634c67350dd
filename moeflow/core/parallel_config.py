"""How the processes of one engine share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

ExpertLayout = Literal["expert", "sliced"]  # each rank has a block of a layer's experts, or a slice of every expert
AttentionLayout = Literal["replicated", "tensor"]  # each rank has all heads, or a block of them

EXPERT_LAYOUTS: Final[tuple[ExpertLayout, ...]] = get_args(ExpertLayout)
ATTENTION_LAYOUTS: Final[tuple[AttentionLayout, ...]] = get_args(AttentionLayout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The ranks of one machine: how experts are laid out over them, and how attention, dense layers and the head."""

    num_ranks: int
    expert_layout: ExpertLayout = "expert"
    attention_layout: AttentionLayout = "replicated"
    timeout_s: float = 60.0  # that a rank waits for the others in a collective
