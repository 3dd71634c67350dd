"""The part after attention as one call over several layers."""

from __future__ import annotations

from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.cpu.stages import MoEStage, SharedExpert
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.norm import PostNorms
from moeflow.kernels.routing import Routing
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.norm import Norm


def expert_stage(
    o_proj: Linear,
    norm: Norm,
    router: PackedWeight | None,
    choose: Routing,
    experts: tuple[PackedExperts, Array | None, ExpertBiases | None],
    router_bias: Array | None = None,
    shared: SharedExpert | None = None,
    post_norms: PostNorms | None = None,
) -> MoEStage | None:
    """Return the call for experts as `ExpertWeights.for_kernels` has them; without a router the network is dense.

    None if the output projection is not packed.
    """
    packed, slots, biases = experts
    if not isinstance(o_proj.weight, PackedWeight):
        return None
    return MoEStage(
        o_proj=o_proj.weight,
        o_bias=o_proj.bias,
        norm=norm.weights,
        router=router,
        choose=choose,
        experts=packed,
        slots=slots,
        biases=biases,
        router_bias=router_bias,
        shared=shared,
        post_norms=post_norms,
    )
