"""A model's feed-forward networks and experts, and how routers choose among these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HiddenAct = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig:
    """The networks of layers: experts, shared experts, and those of layers without experts."""

    intermediate_size: int  # of one expert; in a dense model, of the feed-forward network
    hidden_act: HiddenAct = "silu"
    is_gated: bool = True  # feed-forward networks and experts have three matrices, else two
    swiglu_limit: float | None = None  # of gates and ups, which then meet in (up + 1) gate sigmoid(swiglu_alpha gate)
    swiglu_alpha: float = 1.0
    mlp_bias: bool = False
    expert_bias: bool = False  # of gates, ups and downs
    dense_layers: tuple[int, ...] = ()  # layers of an MoE model without experts
    dense_intermediate_size: int = 0  # of those layers
    wide_layers: tuple[int, ...] = ()  # layers of a dense model whose networks are twice as wide
    shared_intermediate_size: int = 0  # of an expert that computes all tokens of a layer; 0: there is none
    has_shared_gate: bool = False  # whether a gate weighs its result

    @property
    def num_matrices(self) -> int:
        """Matrices of an expert, or of a dense network: gate, up and down, or without a gate."""
        return 3 if self.is_gated else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How routers choose experts, and how they weigh them."""

    num_experts: int = 0  # of a layer; 0: the model is dense
    top_k: int = 0  # experts per token
    norm_topk_prob: bool = True
    min_topk_total: float = 0.0  # normalised weights are divided by their sum, or by this if it is larger
    routed_scaling_factor: float = 1.0  # of the weights of chosen experts
    num_expert_groups: int = 1  # of neighbours
    num_chosen_groups: int = 1  # groups with experts to choose from
    sparsemixer_jitter: float | None = None  # of routers that choose as SparseMixer does; None: they do not
