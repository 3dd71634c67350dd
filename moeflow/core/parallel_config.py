"""How the processes of one engine share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

ExpertLayout = Literal["expert", "sliced"]  # each rank has a block of a layer's experts, or a slice of every expert
AttentionLayout = Literal["replicated", "tensor"]  # each rank has all heads, or a block of them

EXPERT_LAYOUTS: Final[tuple[ExpertLayout, ...]] = get_args(ExpertLayout)
EXPERT_PLACEMENTS: Final = ("index", "load")  # whole experts by number, or moved so that ranks get equal loads
ATTENTION_LAYOUTS: Final[tuple[AttentionLayout, ...]] = get_args(AttentionLayout)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """Where ranks on other machines join, and who may."""

    host: str  # an address of this machine; 0.0.0.0: all of them
    port: int
    token_file: str  # has the cluster's token; made if it is not there
    timeout_s: float = 600.0  # that the first rank waits for the others to join


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The ranks of an engine: how experts are laid out over them, and how attention, dense layers and the head."""

    num_ranks: int
    expert_layout: ExpertLayout = "expert"
    moves_experts: bool = True  # whole ones, to other ranks while serving, as loads call for it
    num_redundant_experts: int = 0  # of each layer, that have a further home once loads are known
    attention_layout: AttentionLayout = "replicated"
    timeout_s: float = 60.0  # that a rank waits for the others in a collective
    join: JoinConfig | None = None  # None: all ranks are processes of this machine; else all but the first join
