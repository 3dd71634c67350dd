"""What a rank has of the model and with whom it shares that, what ranks do between two passes, and their statistics."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec
import torch

from moeflow.core.engine_messages import ExpertStats, RankStats
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.engine.ranks.slow_rank import slow_rank
from moeflow.models.layers.ranks.expert_ranks import ExpertRanks
from moeflow.models.layers.ranks.own_tokens import TokenRounds
from moeflow.parallel.alternating_group import AlternatingGroup
from moeflow.parallel.device_group import DeviceGroup
from moeflow.parallel.group import Group, OverlappingGroup
from moeflow.parallel.stages import layers_of, same_stage
from moeflow.parallel.timed_group import TimedGroup, WaitClock

logger = logging.getLogger(__name__)

TIMES_PASSES: Final = 64  # after the first and then every so many, ranks tell each other what each has done


class _Told(NamedTuple):
    """What ranks tell each other."""

    waited_s: float = 0.0
    busy_s: float = 0.0
    num_experts: float = 0.0
    tokens_per_pass: float = 0.0
    imbalance: float = 0.0  # of its stage,
    num_moves: float = 0.0  # likewise


class RankUpkeep:
    """One rank's part of it."""

    def __init__(
        self, group: OverlappingGroup, shape: ModelConfig, parallel: ParallelConfig, device: torch.device | None = None
    ) -> None:
        """Take all ranks, the model that they share, and how; `device` is this rank's, None: it computes on the CPU.

        Raises: ConfigError, GroupError if devices do not meet.
        """
        clock = WaitClock()
        self.alternating: AlternatingGroup | None = None  # what computes halves of a pass by turns; None: nothing does
        if parallel.alternating_tokens:
            self.alternating = AlternatingGroup(group, clock)
        self.group = TimedGroup(self.alternating or group, clock)
        self.layers = layers_of(parallel, shape, group.rank)
        self.layer_group: Group | None = None  # the group that shares its layers; None: there are no others
        if parallel.num_stages == 1:
            self.layer_group = self.group
        elif parallel.ranks_per_stage > 1:
            self.layer_group = self.group.subgroup(same_stage(parallel, group.rank))
        self.devices: DeviceGroup | None = None  # of the ranks that share layers
        self.experts: ExpertRanks | None = None
        self.rounds: TokenRounds | None = None  # None: ranks have the same tokens
        if device is not None:
            self.devices = self.layer_group = DeviceGroup(self.group, device)
        elif self.layer_group is not None:
            self.experts = ExpertRanks.of(shape, parallel, self.layer_group, self.layers)
            if parallel.has_own_sequences:
                self.rounds = TokenRounds(self.layer_group, shape.hidden_size, shape.routing.top_k)
        self._layers_of_each = [layers_of(parallel, shape, rank) for rank in range(group.size)]
        self._ranks_per_stage = parallel.ranks_per_stage
        self._told = [_Told()] * group.size  # by rank
        self._slow: int | None = None  # the rank that the others wait for
        self._named: set[int] = set()  # already named in the log
        self._busy_s = 0.0
        self._passes = 0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute a pass in the block; then move experts if loads call for it.

        At times it waits for the other ranks. Raises: GroupError.
        """
        start_s, waited_s = time.perf_counter(), self.group.clock.waited_s
        yield
        self._busy_s += time.perf_counter() - start_s - (self.group.clock.waited_s - waited_s)
        if self.experts is not None:
            self.experts.end_pass()
        self._passes += 1
        if self._passes % TIMES_PASSES == 1:
            told = self.group.all_gather("what each rank has done", torch.tensor([self._own()], dtype=torch.float64))
            before, self._told = self._told, [_Told(*each[0].tolist()) for each in told]
            # The first has no limit. A rank with sequences of its own may have more work, and yet be healthy.
            if self._passes > 1 and self.rounds is None:
                self._look_for_a_slow_one(before)

    def add_stats(self, stats: ExpertStats, hosts: Sequence[str]) -> ExpertStats:
        """Return statistics with those of the ranks, which run on these hosts."""
        firsts = self._told[:: self._ranks_per_stage]  # one of each stage
        return msgspec.structs.replace(
            stats,
            ranks=[self._stats_of(rank, host) for rank, host in enumerate(hosts)],
            rank_imbalance=sum(told.imbalance for told in firsts) / len(firsts),
            expert_moves_total=int(sum(told.num_moves for told in firsts)),
        )

    def _look_for_a_slow_one(self, before: Sequence[_Told]) -> None:
        """Look whether ranks have waited for one of them since they told each other last."""
        waited = [now.waited_s - then.waited_s for now, then in zip(self._told, before, strict=True)]
        busy = [now.busy_s - then.busy_s for now, then in zip(self._told, before, strict=True)]
        shares = [w / max(w + b, 1e-9) for w, b in zip(waited, busy, strict=True)]
        self._slow = slow_rank(shares)
        if self.group.rank == 0 and self._slow is not None and self._slow not in self._named:
            self._named.add(self._slow)
            logger.warning(
                "rank %d is slow: the others waited for it in %.0f%% of the time of the last %d passes. Is its "
                "processor shared, throttled or weaker? Results stay the same",
                *(self._slow, 100 * max(shares), TIMES_PASSES),
            )

    def _stats_of(self, rank: int, host: str) -> RankStats:
        told, layers = self._told[rank], self._layers_of_each[rank]
        return RankStats(
            host=host,
            first_layer=layers.start,
            num_layers=len(layers),
            busy_s_total=told.busy_s,
            waited_s_total=told.waited_s,
            is_slow=rank == self._slow,
            num_experts=int(told.num_experts),
            tokens_per_pass=told.tokens_per_pass,
        )

    def _own(self) -> _Told:
        times = (self.group.clock.waited_s, self._busy_s)
        if self.experts is None:
            return _Told(*times)
        balancer, rank = self.experts.balancer, self.group.rank % self._ranks_per_stage
        held, load = balancer.num_held[rank], balancer.rank_loads[rank]
        return _Told(*times, held, load, balancer.imbalance, balancer.num_moves)
