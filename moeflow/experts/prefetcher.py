"""Reads experts ahead: what a predictor names for the next layer is loaded while this one computes.

Guesses order reads and nothing else; the governor asks after every pass whether they pay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.predict.governor import Governor
from moeflow.experts.predict.predictor import Predictor
from moeflow.kernels.cpu.decoder import NOTHING, Expected

_MAX_TOKENS: Final = 8  # of a pass; more need so many experts that reads on demand keep the disk busy


class Routes(Protocol):
    """A layer's router."""

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return topk_ids and topk_weights [T, K] of hidden [T, H]."""
        ...


class NextRouter:
    """Asks the next layer's router about this layer's input: finds most of the experts without any training."""

    def __init__(self, blocks: Sequence[Routes]) -> None:
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

    def __init__(self, cache: ExpertCache, predictor: Predictor, governor: Governor, num_layers: int) -> None:
        self.note = ""  # what the governor said last
        self._cache = cache
        self._predictor = predictor
        self._governor = governor
        self._num_layers = num_layers
        self._num_tokens: int | None = None  # of the pass; None: as far as it has come it has found everything

    @property
    def is_on(self) -> bool:
        """Whether guesses are followed now."""
        return self._governor.is_on

    def see(self, layer: int, hidden: Tensor, topk_ids: Tensor) -> None:
        """Hear what a layer's router chose, once its own loads are queued, and prefetch for the next layer.

        Shapes: hidden [T, H], topk_ids [T, K].
        """
        self._predictor.observe(layer, topk_ids.flatten().tolist())
        self._num_tokens = len(hidden)
        if not self._may_guess:
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
        if is_last and self._may_guess:
            self._cache.prefetch(0, self._predictor.predict(0))

    def expected(self, num_tokens: int) -> Expected:
        """Return what a pass of so many tokens will probably need: it is to be told to `see` if that is absent."""
        self._num_tokens = num_tokens
        if not self._may_guess:
            return NOTHING
        if isinstance(self._predictor, NextRouter):
            return Expected(by_next_router=True)
        guesses = torch.zeros(self._num_layers, self._cache.num_experts, dtype=torch.uint8)
        for layer in range(self._num_layers):
            guesses[layer, self._predictor.predict(layer)] = 1
        return Expected(guesses=guesses)

    def end_pass(self, seconds: float) -> str | None:
        """Let the governor judge by how long a pass took; return what it says if its verdict is new.

        A pass that lacked nothing says nothing about reading, and what a large one read ahead was needed for certain.
        """
        num_tokens, self._num_tokens = self._num_tokens, None
        if num_tokens is None or num_tokens > _MAX_TOKENS:
            return None
        said = self._governor.end_pass(num_tokens, seconds)
        self.note = said or self.note
        return said

    @property
    def _may_guess(self) -> bool:
        return self._governor.is_on and self._num_tokens is not None and self._num_tokens <= _MAX_TOKENS
