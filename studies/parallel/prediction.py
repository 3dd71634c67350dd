"""What the simulator says of the cases that are measured, on a description of this machine.

It is measured with as many threads as ranks run at once, for these share its memory: a rank is one of the threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from moeflow.core.attention_config import RopeConfig
from moeflow.core.hardware import Machine
from moeflow.core.model_config import ModelConfig
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.roofline import divided
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.hardware.kernel_bench import KernelShape
from studies.parallel.case import Case, LayerShape
from studies.parallel.layer_cost import LayerCost, ParallelLayer, layer_cost
from studies.parallel.rank_rates import Measured, rank_rates, with_experts
from studies.parallel.shared_weights import slice_bounds

FEW_EXPERTS: Final = 8


def ranks_at_once(num_ranks: int) -> int:
    """Return how many ranks compute at the same time here."""
    return min(num_ranks, host_resources().num_cores)


def predict(case: Case, machine: Machine, layouts: Iterable[str], measured: Measured) -> dict[str, LayerCost]:
    """Return the cost of each layout.

    The machine is as `ranks_at_once` threads measure it, `measured` what ranks do beside each other.
    """
    costs = _costs(case.layer)
    level = divided(machine.compute_level, ranks_at_once(case.layer.num_ranks))
    layer = ParallelLayer(
        level=with_experts(level, case.layer, costs, measured),
        link=None,
        costs=costs,
        rates=rank_rates(case.layer, measured),
        num_ranks=case.layer.num_ranks,
        topk_ids=case.topk_ids(),
        loads=case.loads_before(),
        capacity_factor=case.capacity_factor,
    )
    return {name: layer_cost(name, layer) for name in layouts}


def kernel_shapes(layer: LayerShape) -> list[KernelShape]:
    """Return what a machine has to be measured with: the router, a whole expert, a slice.

    Experts are measured with three matrices; those of two narrower than they are, so that there are as many weights.
    There are few of them, so that the figures reach up to many rows an expert.
    """
    bounds = slice_bounds(layer.width, layer.num_ranks)
    widths = (layer.width, *(stop - start for start, stop in pairwise(bounds)))
    experts = [
        KernelShape("experts", layer.weights, (FEW_EXPERTS, 1, layer.hidden, max(layer.num_matrices * width // 3, 1)))
        for width in widths
    ]
    return [KernelShape("linear", layer.weights, (layer.num_experts, layer.hidden)), *dict.fromkeys(experts)]


def _costs(layer: LayerShape) -> ModelCosts:
    """Return the costs of a model that is this layer."""
    shape = ModelConfig.from_fields(
        model_type="layer",
        vocab_size=1,
        hidden_size=layer.hidden,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        intermediate_size=layer.width,
        max_position=1,
        eps=1e-6,
        rope=RopeConfig(),
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        is_gated=layer.is_gated,
    )
    formats = Formats(matrices=layer.weights, embeddings=layer.weights, kv="float32")
    return ModelCosts(shape, formats)
