"""The prefetch driver: starts reads of the experts that sources rank, while the sources' trials allow it.

Draft models may name the experts of a pass before it begins. Such a pass belongs to the drafts: they know its tokens,
so no other source ranks experts for it as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, Generic

from moeflow.core.request import Request
from moeflow.core.trial import Trial
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.prefetch.source import PassT, Source
from moeflow.kernels.cpu.decoder import NOTHING, Expected


class PrefetchDriver(Generic[PassT]):
    """Asks sources, prefetches the experts that they rank, and reports the times of passes to their trials."""

    def __init__(
        self,
        cache: ExpertCache,
        sources: Sequence[Source[PassT]] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Without sources nothing is prefetched, for drafts neither."""
        self.sources = sources
        self.draft_trial = Trial("prefetching by drafts", starts_on=True)
        self.has_drafts = False  # whether draft models ran for the pass under way, or the next one
        self._cache, self._clock = cache, clock
        self._began_s = self._stall_s = 0.0  # of the pass: its begin, and the waits for experts before it
        self._judged: Sequence[Trial] = ()  # the trials that the pass under way counts for

    @property
    def trials(self) -> list[Trial]:
        """The trials of all sources, and of drafts."""
        return [*(source.trial for source in self.sources), self.draft_trial] if self.sources else []

    @property
    def is_on(self) -> bool:
        """Whether the driver prefetches now."""
        return any(trial.is_on for trial in self.trials)

    @property
    def is_followed(self) -> bool:
        """Whether the pass under way follows a source, or drafts."""
        return any(trial.is_on for trial in self._judged)

    def expect(self, request: Request) -> None:
        """Receive a request of a later pass."""
        for source in self._followed:
            source.expect(request)

    def begin_drafting(self) -> None:
        """Count the time from now on as time of the next pass."""
        if not self.has_drafts:
            self.has_drafts = True
            self._begin()

    def expect_drafted(self, experts: Collection[int]) -> None:
        """Prefetch for drafted tokens. `experts` are numbered over all layers."""
        if self.draft_trial.is_on:
            self._cache.prefetch_pass(sorted(experts))

    def begin_pass(self, batch: PassT) -> None:
        """Prefetch for the pass that begins. Blocks: while sources compute."""
        if self.has_drafts:
            self._judged = [self.draft_trial]
            return
        self._begin()
        sources = [source for source in self.sources if source.begin_pass(batch)]
        self._judged = [source.trial for source in sources]
        for source in sources:
            if source.trial.is_on and (ranked := source.rank_pass(batch)):
                self._cache.prefetch_pass(ranked)

    def see(self, layer: int, hidden: Any, topk_ids: Any) -> None:
        """Receive the choice of a layer's router after the layer's own loads were queued; prefetch for later layers.

        Shapes: hidden [T, H], the layer's input; topk_ids [T, K].
        """
        self._observe(layer, topk_ids.flatten().tolist())
        self._rank_layers(layer, len(topk_ids), hidden)

    def see_hits(self, first_layer: int, topk_ids: Any) -> None:
        """Receive the choices of layers that kernels ran alone. Shapes: topk_ids [layers, T, K]."""
        for layer, expert_ids in enumerate(topk_ids.flatten(1).tolist(), first_layer):
            self._observe(layer, expert_ids)
        self._rank_layers(first_layer + len(topk_ids) - 1, topk_ids.shape[1], None)

    def expected(self, num_tokens: int) -> Expected:
        """Return the experts that kernels should expect in a pass; at an absent one they stop, and `see` follows."""
        found = (source.expected(num_tokens) for source in self._followed)
        return next((expected for expected in found if expected is not NOTHING), NOTHING)

    def end_pass(self, num_tokens: int) -> None:
        """Report the time of a pass to the trials that it counts for.

        While all experts are resident there is nothing to prefetch, so passes tell nothing.
        """
        seconds, waited_s = self._clock() - self._began_s, self._cache.stall_s - self._stall_s
        judged = self._judged
        self.drop_pass()
        if not self._cache.has_absent:
            return
        for trial in judged:
            trial.end_pass(num_tokens, seconds, 0.0 if trial is self.draft_trial else waited_s)

    def drop_pass(self) -> None:
        """Forget a pass, for example a failed one."""
        self.has_drafts, self._judged = False, ()

    def close(self) -> None:
        """End the sources' threads. Blocks: until their current work is done."""
        with ExitStack() as closing:
            for source in self.sources:
                closing.callback(source.close)

    def _begin(self) -> None:
        self._began_s, self._stall_s = self._clock(), self._cache.stall_s

    @property
    def _followed(self) -> list[Source[PassT]]:
        return [source for source in self.sources if source.trial.is_on]

    def _observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        for source in self.sources:
            source.observe(layer, expert_ids)

    def _rank_layers(self, layer: int, num_tokens: int, hidden: Any) -> None:
        for source in self._followed:
            for later, experts in source.rank_layers(layer, num_tokens, hidden):
                self._cache.prefetch(later, experts)
