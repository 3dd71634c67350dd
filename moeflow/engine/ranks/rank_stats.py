"""What the ranks of an engine have to do, as its statistics tell it."""

from __future__ import annotations

import msgspec

from moeflow.engine.messages import ExpertStats, RankStats
from moeflow.models.layers.expert_ranks import ExpertRanks


def with_ranks(stats: ExpertStats, ranks: ExpertRanks) -> ExpertStats:
    """Return the statistics with what is known of the ranks; all of it is kept, nothing computed here."""
    balancer = ranks.balancer
    of_each = zip(balancer.num_held, balancer.rank_loads, ranks.waited_s, strict=True)
    return msgspec.structs.replace(
        stats,
        ranks=[
            RankStats(num_experts=held, tokens_per_pass=load, waited_s_total=waited) for held, load, waited in of_each
        ],
        rank_imbalance=balancer.imbalance,
        expert_moves_total=balancer.num_moves,
    )
