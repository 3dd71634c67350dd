"""One MoE layer on many ranks, section by section: how long it takes, and how long ranks wait for each other.

Synchronous: each section ends at a barrier, so all ranks wait for the slowest (ExpertFlow, figure 3.2;
study of sliced experts, figure 6.6). Costs are those of `studies/parallel/layer_cost.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeflow.parallel.placement.layouts import CAPACITY
from studies.parallel.layer_cost import LayerCost, ParallelLayer, PerRank, layer_cost


@dataclass(frozen=True)
class ParallelRun:
    """A layer in one layout."""

    layout: str
    cost: LayerCost
    num_choices: int  # of experts by tokens: T * K

    @cached_property
    def seconds(self) -> float:
        """Of the layer, until all ranks are done."""
        return float(sum(times.max() for times in self.cost.sections.values()))

    @cached_property
    def idle_s(self) -> PerRank:
        """Seconds that each rank waits at barriers, [P]."""
        waits: PerRank = np.sum([times.max() - times for times in self.cost.sections.values()], axis=0)
        return waits

    @property
    def work_imbalance(self) -> float:
        """The most operations of a rank over the mean; 1: all alike."""
        return float(self.cost.num_flops.max() / self.cost.num_flops.mean())

    @property
    def dropped_share(self) -> float:
        """Of the choices of experts."""
        return self.cost.num_dropped / self.num_choices


def run_layouts(at: ParallelLayer, layouts: tuple[str, ...]) -> tuple[dict[str, ParallelRun], ParallelRun]:
    """Return the layer in each layout, and in the baseline that others are compared with, which is the padded one.

    Raises: as `layer_cost`.
    """
    runs = {
        name: ParallelRun(name, layer_cost(name, at), at.topk_ids.size) for name in dict.fromkeys((*layouts, CAPACITY))
    }
    return {name: runs[name] for name in layouts}, runs[CAPACITY]
