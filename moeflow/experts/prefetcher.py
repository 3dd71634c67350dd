"""Reads experts ahead: what a predictor names for the next layer is loaded while this one computes.

Guesses order reads and nothing else. A trial decides whether passes are faster with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.core.trial import Trial
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.predict.predictor import MAX_TOKENS, Predictor
from moeflow.kernels.cpu.decoder import NOTHING, Expected
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


class Prefetcher:
    """Passes what routers choose to a predictor, and prefetches what it predicts while the trial allows it."""

    def __init__(self, cache: ExpertCache, predictor: Predictor, trial: Trial, num_layers: int) -> None:
        self._cache = cache
        self._predictor = predictor
        self.trial = trial
        self._num_layers = num_layers
        self._num_tokens: int | None = None  # of the pass; None: as far as it has come it has found everything

    @property
    def is_on(self) -> bool:
        """Whether guesses are followed now."""
        return self.trial.is_on

    def begin_pass(self) -> None:
        """Begin a pass, which has found everything so far."""
        self._num_tokens = None

    def expect(self, num_tokens: int, named: Sequence[Sequence[int]]) -> None:
        """Receive what a network says that each layer of a pass will need, and prefetch for all of them.

        It is to be asked only while guesses are followed.
        """
        self._predictor.expect(named)
        first = range(0, self._num_layers * self._cache.num_experts, self._cache.num_experts)
        wanted = [at + expert for layer, at in enumerate(first) for expert in self._predictor.predict(layer)]
        if self._cache.prefetch_pass(wanted):
            self._num_tokens = num_tokens

    def see(self, layer: int, hidden: Tensor, topk_ids: Tensor) -> None:
        """Receive what a layer's router chose, once its own loads are queued, and prefetch for those to come.

        Shapes: hidden [T, H], topk_ids [T, K].
        """
        self._predictor.observe(layer, topk_ids.flatten().tolist())
        self._num_tokens = len(hidden)
        if not self._may_guess:
            return
        self._predictor.observe_input(layer, hidden)
        for later in self._predictor.due(layer):
            self._cache.prefetch(later, self._predictor.predict(later))

    def see_hits(self, first_layer: int, topk_ids: Tensor) -> None:
        """Receive what the routers of layers chose that kernels have run alone. Shapes: topk_ids [layers, T, K]."""
        if self._predictor.routers_ahead:
            return
        for layer, ids in enumerate(topk_ids.flatten(1).tolist(), first_layer):
            self._predictor.observe(layer, ids)
        is_last = first_layer + len(topk_ids) == self._num_layers
        if is_last and self._may_guess:
            self._cache.prefetch(0, self._predictor.predict(0))

    def expected(self, num_tokens: int) -> Expected:
        """Return what a pass of so many tokens will probably need: `see` is to be called if that is absent."""
        self._num_tokens = num_tokens
        if not self._may_guess:
            return NOTHING
        if self._predictor.routers_ahead:
            return Expected(routers_ahead=self._predictor.routers_ahead)
        guesses = torch.zeros(self._num_layers, self._cache.num_experts, dtype=torch.uint8)
        for layer in range(self._num_layers):
            guesses[layer, self._predictor.predict(layer)] = 1
        return Expected(guesses=guesses)

    def end_pass(self, seconds: float, waited_s: float) -> None:
        """Report to the trial how long a pass took, and how long it waited for the disk.

        A pass that lacked nothing tells nothing about reading, and what a large one read ahead was needed for certain.
        """
        num_tokens, self._num_tokens = self._num_tokens, None
        if num_tokens is not None and num_tokens <= MAX_TOKENS:
            self.trial.end_pass(num_tokens, seconds, waited_s)

    @property
    def _may_guess(self) -> bool:
        return self.trial.is_on and self._num_tokens is not None and self._num_tokens <= MAX_TOKENS
