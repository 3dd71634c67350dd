"""How the processes of one engine share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from moeflow.core.address import Address
from moeflow.core.offload_config import CUDA
from moeflow.core.units import KIB

WHOLE: Final = "expert"  # each rank has a block of a layer's experts
SLICED: Final = "sliced"  # each rank has a slice of every expert
# Each rank attends with all heads, with a block of them, or with all heads to sequences of its own.
AttentionLayout = Literal["replicated", "tensor", "data"]

EXPERT_LAYOUTS: Final = (WHOLE, SLICED)
EXPERT_PLACEMENTS: Final = ("index", "load")  # whole experts by number, or moved so that ranks get equal loads
RANK_SCHEDULES: Final = ("auto", "synchronous", "asynchronous")
ATTENTION_LAYOUTS: Final[tuple[AttentionLayout, ...]] = get_args(AttentionLayout)
FORECAST_LAYOUTS: Final = ATTENTION_LAYOUTS[:2]  # that planning compares; users name the others
# Of an engine's ranks on nodes: a node for each, or as far as there are nodes, or as few nodes as possible.
RAY_PLACEMENTS: Final = ("strict-spread", "spread", "pack")
# Of the pairs of whole experts, up to which each rank adds up all of them: one exchange instead of two.
GATHERED_BYTES: Final = 256 * KIB


def device_of_rank(device: str, rank: int) -> str:
    """Return the device of a rank: GPUs follow one another from the first rank's on."""
    kind, _, first = device.partition(":")
    return f"{kind}:{int(first or 0) + rank}" if kind == CUDA else device


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster whose nodes run engines or ranks."""

    address: str  # HOST:PORT of its head; "auto": the cluster that this machine is a node of
    placement: str = "strict-spread"  # one of RAY_PLACEMENTS


class JoinConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The server's address for other machines, and its secret."""

    host: str  # an address of this machine; 0.0.0.0: all of them; empty: its address in the Ray cluster
    port: int  # 0: any
    token_file: str  # has the cluster's token; made if it is not there
    ray: RayConfig | None = None  # which starts processes on other machines; None: their users do


class NodeReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """Engines of one server with processes on other machines."""

    number: int  # at the start, and the least
    most: int  # if the load needs them
    join: JoinConfig
    has_first_here: bool = False  # there is one engine, with its first rank on this machine
    first_token_s: float | None = None  # target for the time to the first token; None: there is none


class RankLinks(msgspec.Struct, frozen=True, kw_only=True):
    """A process's number among the ranks of an engine, and the addresses of all of them."""

    rank: int
    addresses: tuple[Address, ...]  # by rank, where each accepts links
    secret: bytes  # of these processes only


class MicroBatchCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass through all layers costs, for the rule that cuts it into micro-batches."""

    fixed_s: float  # weights that every pass reads
    expert_s: float  # one expert of every layer that has experts
    num_experts: int  # of a layer; 0: none has any
    top_k: int
    token_s: float  # computing one token


class StageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The split of layers into stages. One rank computes a stage, or several ranks share its layers."""

    num_layers: tuple[int, ...]  # of each stage; the first has token embeddings and output projection, too
    costs: MicroBatchCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The ranks of an engine: how layers are cut into stages, and how the ranks of a stage share experts and heads."""

    num_ranks: int  # of all stages, which have as many each: first those of the first stage, and so on
    stages: StageConfig | None = None  # None: all ranks have all layers
    expert_layout: str = WHOLE  # or SLICED, or another package's layout of whole experts
    moves_experts: bool = True  # whole ones, to other ranks while serving, as loads call for it
    num_redundant_experts: int = 0  # of each layer, that have a further home once loads are known
    expert_loads: tuple[tuple[int, ...], ...] = ()  # of each MoE layer: recorded choices of each expert; empty: unknown
    attention_layout: AttentionLayout = "replicated"
    timeout_s: float = 30.0  # that a rank waits for the others in a collective; longer if passes are slow
    alternating_tokens: int = 0  # of a pass that ranks compute in two halves, one while the other waits; 0: none
    is_spread: bool = False  # over machines, a rank on each; else all ranks are processes of one machine
    links: RankLinks | None = None  # of one rank, once each has a place

    @property
    def has_slices(self) -> bool:
        """Whether each rank has a slice of every expert; else some have whole ones."""
        return self.expert_layout == SLICED

    @property
    def places_by_load(self) -> bool:
        """Whether several ranks have whole experts that move as loads call for it."""
        return self.expert_layout == WHOLE and self.moves_experts and self.ranks_per_stage > 1

    @property
    def has_own_sequences(self) -> bool:
        """Whether each rank attends to sequences of its own."""
        return self.attention_layout == "data"

    @property
    def num_stages(self) -> int:
        """Stages that hidden states go through; 1: layers are not cut."""
        return 1 if self.stages is None else len(self.stages.num_layers)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that share the layers of a stage."""
        return self.num_ranks // self.num_stages
