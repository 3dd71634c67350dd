"""The ways ranks can share a model of a given shape."""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import WHOLE, ParallelConfig
from moeflow.planner.choices.refused_settings import SHARED_HEADS, why_refused

_HEADS: Final = "(--attention-layout tensor)"


def why_not_shared(parallel: ParallelConfig, shape: ModelConfig) -> str:
    """Return why ranks cannot share a model in this way; empty: they can."""
    number = parallel.ranks_per_stage
    if not shape.routing.num_experts and parallel.attention_layout != "tensor":
        return f"{number} ranks (--ranks) cannot share the layers of a model without experts: use one" + (
            "" if why_refused(shape, SHARED_HEADS) else f", or let them share attention and dense layers {_HEADS}"
        )
    if parallel.has_own_sequences and parallel.stages is not None:
        return "ranks with sequences of their own (--attention-layout data) have all layers: remove --stages"
    if parallel.attention_layout == "tensor" and (reason := why_refused(shape, SHARED_HEADS)):
        return reason
    if parallel.attention_layout == "tensor" and number > shape.attention.num_heads:
        return (
            f"{number} ranks (--ranks) cannot share {shape.attention.num_heads} attention heads "
            "(--attention-layout tensor): use fewer"
        )
    if shape.routing.num_experts and parallel.expert_layout == WHOLE and number > shape.routing.num_experts:
        return (
            f"{number} ranks (--ranks) cannot share the layers of a model with only "
            f"{shape.routing.num_experts} experts: use fewer, or slices of experts (--expert-layout sliced)"
        )
    redundant, can_move = parallel.num_redundant_experts, parallel.moves_experts and parallel.expert_layout == WHOLE
    most = (number - 1) * shape.routing.num_experts
    if redundant and not (can_move and redundant <= most):
        return (
            f"{redundant} replicas of experts (--redundant-experts) cannot be placed: give at most {most}, which is "
            f"each expert on each of {number} ranks, with --expert-placement load and --expert-layout expert"
        )
    return ""
