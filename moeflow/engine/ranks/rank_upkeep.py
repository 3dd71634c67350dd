"""What ranks do between two passes, all of them after the same one, and what their statistics tell."""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from moeflow.engine.messages import ExpertStats, RankStats
from moeflow.models.layers.ranks.expert_ranks import ExpertRanks
from moeflow.parallel.timed_group import TimedGroup

TIMES_PASSES: Final = 64  # after which ranks tell each other how long they have waited


class RankUpkeep:
    """One rank's part of it."""

    def __init__(self, group: TimedGroup, experts: ExpertRanks | None) -> None:
        """Take the ranks, and who has which experts; None: each has a part of all."""
        self.group = group
        self.experts = experts
        self._waited_s = [0.0] * group.size  # by rank, in collectives
        self._passes = 0

    def end_pass(self) -> None:
        """Move experts if loads call for it. Blocks: until the other ranks are here, at times. Raises: GroupError."""
        if self.experts is not None:
            self.experts.end_pass()
        self._passes += 1
        if self._passes % TIMES_PASSES == 0:
            waited = self.group.all_gather("times waited", torch.tensor([self.group.waited_s]))
            self._waited_s = [each.item() for each in waited]

    def add_stats(self, stats: ExpertStats) -> ExpertStats:
        """Return statistics with what is known of the ranks."""
        if self.experts is None:
            return msgspec.structs.replace(stats, ranks=[RankStats(waited_s_total=each) for each in self._waited_s])
        balancer = self.experts.balancer
        of_each = zip(self._waited_s, balancer.num_held, balancer.rank_loads, strict=True)
        return msgspec.structs.replace(
            stats,
            ranks=[
                RankStats(waited_s_total=waited, num_experts=held, tokens_per_pass=load)
                for waited, held, load in of_each
            ],
            rank_imbalance=balancer.imbalance,
            expert_moves_total=balancer.num_moves,
        )
