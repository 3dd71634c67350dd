"""Reads experts ahead: what a predictor names for the next layer is loaded while this one computes.

Guesses order reads and nothing else; the governor asks after every pass whether they pay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from moeflow.kernels.cpu_decoder import NOTHING, Expected
from moeflow.layers.moe import MoE
from moeflow.memory.cache_stats import CacheStats
from moeflow.memory.expert_cache import ExpertCache
from moeflow.predict.governor import Governor, Outcome
from moeflow.predict.predictor import Predictor

_MAX_TOKENS: Final = 8  # of a pass; more need so many experts that reads on demand keep the disk busy


class NextRouter:
    """Asks the next layer's router about this layer's input: finds most of the experts without any training."""

    def __init__(self, blocks: Sequence[MoE]) -> None:
        """Take the blocks of all layers that have experts."""
        self._blocks = blocks
        self._guesses: list[list[int]] = [[] for _ in blocks]

    def see_input(self, layer: int, hidden: Tensor) -> None:
        """Guess the following layer's experts from this layer's input [T, H]."""
        if layer + 1 < len(self._blocks):
            topk_ids, _ = self._blocks[layer + 1].route(hidden)
            self._guesses[layer + 1] = [expert for expert, _ in Counter(topk_ids.flatten().tolist()).most_common()]

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """The past does not count."""

    def predict(self, layer: int) -> list[int]:
        """Return the experts guessed for a layer; none for the first."""
        return self._guesses[layer]


class Prefetcher:
    """Stands between router, predictor, governor and cache."""

    def __init__(self, cache: ExpertCache, predictor: Predictor, name: str, num_layers: int) -> None:
        self.note = ""  # what the governor said last
        self._cache = cache
        self._predictor = predictor
        self._governor = Governor(name)
        self._num_layers = num_layers
        self._before = CacheStats()
        self._is_small_pass: bool | None = None  # None: as far as it has come it has found everything

    @property
    def is_on(self) -> bool:
        """Whether guesses are followed now."""
        return self._governor.is_on

    def see(self, layer: int, hidden: Tensor, topk_ids: Tensor) -> None:
        """Hear what a layer's router chose, once its own loads are queued, and prefetch for the next layer.

        Shapes: hidden [T, H], topk_ids [T, K].
        """
        self._predictor.observe(layer, topk_ids.flatten().tolist())
        self._is_small_pass = len(hidden) <= _MAX_TOKENS
        if not (self._governor.is_on and self._is_small_pass):
            return
        if isinstance(self._predictor, NextRouter):
            self._predictor.see_input(layer, hidden)
        following = (layer + 1) % self._num_layers
        self._cache.prefetch(following, self._predictor.predict(following))

    def see_hits(self, first_layer: int, topk_ids: Tensor) -> None:
        """Hear what the routers of layers chose that had all of it. Shapes: topk_ids [layers, T, K]."""
        if isinstance(self._predictor, NextRouter):
            return
        for layer, ids in enumerate(topk_ids.flatten(1).tolist(), first_layer):
            self._predictor.observe(layer, ids)
        is_last = first_layer + len(topk_ids) == self._num_layers
        if is_last and self._governor.is_on and self._is_small_pass:
            self._cache.prefetch(0, self._predictor.predict(0))

    def expected(self, num_tokens: int) -> Expected:
        """Return what a pass of so many tokens will probably need: it is to be told to `see` if that is absent."""
        self._is_small_pass = num_tokens <= _MAX_TOKENS
        if not (self._governor.is_on and self._is_small_pass):
            return NOTHING
        if isinstance(self._predictor, NextRouter):
            return Expected(by_next_router=True)
        guesses = torch.zeros(self._num_layers, self._cache.num_experts, dtype=torch.uint8)
        for layer in range(self._num_layers):
            guesses[layer, self._predictor.predict(layer)] = 1
        return Expected(guesses=guesses)

    def end_pass(self) -> str | None:
        """Let the governor judge; return what it says if it switches."""
        is_small, self._is_small_pass = self._is_small_pass, None
        if is_small is None:
            return None
        now, before = self._cache.stats(), self._before
        self._before = now
        if not is_small:  # what it read ahead was needed for certain: nothing to judge
            return None
        harmed_bytes = now.displaced_bytes + now.delayed_bytes - before.displaced_bytes - before.delayed_bytes
        said = self._governor.end_pass(
            Outcome(now.used_bytes - before.used_bytes, now.wasted_bytes - before.wasted_bytes, harmed_bytes)
        )
        self.note = said or self.note
        return said
