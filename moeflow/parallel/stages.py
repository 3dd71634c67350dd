"""Each rank's stage, its layers, and its exchanges with other ranks.

Ranks are numbered stage by stage. Hidden states are whole on each rank of a stage. Rank i of a stage receives them from
rank i of the previous stage and sends its own to rank i of the next. The last stage sends results to the first.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig


def layers_of(parallel: ParallelConfig | None, shape: ModelConfig, rank: int) -> range:
    """Return the layers that a rank has a part of."""
    if parallel is None or parallel.stages is None:
        return range(shape.num_layers)
    bounds = list(pairwise(accumulate(parallel.stages.num_layers, initial=0)))
    return range(*bounds[rank // parallel.ranks_per_stage])


def place_in_stage(parallel: ParallelConfig, rank: int) -> int:
    """Return a rank's number among those of its stage."""
    return rank % parallel.ranks_per_stage


def same_stage(parallel: ParallelConfig, rank: int) -> tuple[int, ...]:
    """Return the ranks that share the layers of a rank, itself among them."""
    size = parallel.ranks_per_stage
    first = rank // size * size
    return tuple(range(first, first + size))


def neighbours(parallel: ParallelConfig, rank: int) -> tuple[int, int]:
    """Return the ranks that a rank has hidden states from, and hands them on to; there are several stages."""
    step, number = parallel.ranks_per_stage, parallel.num_ranks
    return (rank - step) % number, (rank + step) % number


def subgroups(parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """Return the ranks, ascending, of every group but the first one; one of all is for the second half of passes."""
    ranks = range(parallel.num_ranks)
    if parallel.num_stages == 1:
        return [tuple(ranks)] if parallel.alternating_tokens else []
    pairs = {tuple(sorted((rank, neighbours(parallel, rank)[1]))) for rank in ranks}
    stages = {same_stage(parallel, rank) for rank in ranks} if parallel.ranks_per_stage > 1 else set()
    return sorted(pairs | stages)
