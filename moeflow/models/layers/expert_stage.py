"""What follows attention as one call, made from the layers that it takes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu.packed_weights import PackedExperts, PackedWeight
from moeflow.kernels.cpu.stages import MoEStage
from moeflow.kernels.routing import SoftmaxTopK
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.norm import Norm

if TYPE_CHECKING:
    pass


def expert_stage(
    o_proj: Linear,
    norm: Norm,
    router: PackedWeight | None,
    choose: SoftmaxTopK,
    experts: PackedExperts,
    slots: Array | None = None,
) -> MoEStage | None:
    """Return the call; None if the output projection is not packed. Without a router the network is dense."""
    if not isinstance(o_proj.weight, PackedWeight):
        return None
    return MoEStage(
        o_proj=o_proj.weight,
        o_bias=o_proj.bias,
        norm=norm.weights,
        router=router,
        choose=choose,
        experts=experts,
        slots=slots,
    )
