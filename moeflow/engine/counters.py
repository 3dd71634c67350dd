"""What the engine counts while it runs, and the generation speed over the last few seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from moeflow.core.batch import Batch
from moeflow.core.engine_messages import EngineStats, ExpertStats, SpeculatorStats, trial_stats
from moeflow.core.trial import GainTrial
from moeflow.scheduler.policy import SchedulingPolicy
from moeflow.speculation.counts import SpeculationCounts

WINDOW_S = 5.0


class Counters:
    """Totals since start. `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque()  # (when a pass ended, tokens it generated)
        self._recent_tokens = 0
        self.passes = 0
        self.failed_passes = 0
        self.prompt_tokens = 0
        self.prefix_hits = 0
        self.generated_tokens = 0
        self.finished = 0
        self.cancelled = 0

    def count_pass(self, batch: Batch, num_generated: int) -> None:
        """Account for a pass that went well."""
        self.passes += 1
        self.prompt_tokens += sum(
            max(0, min(entry.stop, len(entry.request.prompt_token_ids)) - entry.start) for entry in batch.entries
        )
        self._count(num_generated)

    def count_late(self, num_generated: int) -> None:
        """Account for tokens that an earlier pass brought only now."""
        if num_generated:
            self._count(num_generated)

    def _count(self, num_generated: int) -> None:
        self.generated_tokens += num_generated
        self._recent.append((self._clock(), num_generated))
        self._recent_tokens += num_generated

    def tokens_per_second(self) -> float:
        """Return generated tokens a second over the last `WINDOW_S`, 0 when idle that long."""
        now = self._clock()
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent_tokens -= self._recent.popleft()[1]
        if len(self._recent) < 2:
            return 0.0
        first_end, first_tokens = self._recent[0]
        return (self._recent_tokens - first_tokens) / max(now - first_end, 1e-3)

    def snapshot(
        self,
        scheduler: SchedulingPolicy,
        experts: ExpertStats,
        speculation: SpeculationCounts,
        trials: Iterable[GainTrial],
    ) -> EngineStats:
        """Return the totals, and the state of queue, blocks, experts, speculation and its trials."""
        waiting, running, blocks = scheduler.waiting, scheduler.running, scheduler.blocks
        return EngineStats(
            num_waiting=len(waiting),
            num_running=len(running),
            num_batch_waiting=sum(request.is_batch for request in waiting),
            num_batch_running=sum(request.is_batch for request in running),
            kv_blocks_total=blocks.num_blocks,
            kv_blocks_used=blocks.num_used,
            kv_blocks_cached=blocks.num_cached,
            passes_total=self.passes,
            failed_passes_total=self.failed_passes,
            prompt_tokens_total=self.prompt_tokens,
            prefix_hit_tokens_total=self.prefix_hits,
            generated_tokens_total=self.generated_tokens,
            requests_finished_total=self.finished,
            requests_cancelled_total=self.cancelled,
            preemptions_total=scheduler.num_preemptions,
            tokens_per_second=self.tokens_per_second(),
            speculated_passes_total=speculation.passes,
            drafted_tokens_total=speculation.drafted,
            accepted_tokens_total=speculation.kept,
            drafting_s_total=speculation.draft_s,
            trees_total=list(speculation.trees),
            speculators=[
                SpeculatorStats(
                    name=name,
                    is_resting=counts.is_resting,
                    drafted_total=list(counts.drafted),
                    accepted_total=list(counts.kept),
                    drafting_s_total=counts.draft_s,
                )
                for name, counts in speculation.speculators.items()
            ],
            **msgspec.structs.asdict(experts) | {"trials": [*experts.trials, *trial_stats(trials)]},
        )
