"""Reads ahead what a pass will need in all of its layers, before it begins: a trained network says so from its tokens.

That is SiDA's hash function (2310.18859, section 3.1), but for which experts compute: the model's own routers choose
these, so that no answer changes. A trial decides whether passes are faster for it, the network's own time included.
"""

from __future__ import annotations

from moeflow.core.batch import Batch
from moeflow.core.trial import Trial
from moeflow.engine.followed_texts import FollowedTexts, NewTokens, in_order_of_need
from moeflow.engine.governed_forecast import GovernedForecast
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.predict.predictor import MAX_TOKENS


class ExpertForecast(GovernedForecast):
    """Predicts and prefetches for passes of few tokens, while the trial allows it."""

    def __init__(self, texts: FollowedTexts, cache: ExpertCache, trial: Trial, *, first_layer: int = 0) -> None:
        """`first_layer` is the number, of all with experts, of the first that the network knows."""
        super().__init__(cache, trial)
        self._texts, self._first = texts, first_layer * cache.num_experts

    def begin_pass(self, batch: Batch) -> None:
        """Start reading what the pass will probably need. Blocks: while the network computes."""
        self._before = None
        tokens = new_tokens(batch)
        if not tokens:
            return
        self._before = self._cache.stats()
        if self.trial.is_on:
            self._texts.forget_finished()
            wanted = in_order_of_need(self._texts.wanted(tokens))
            self._cache.prefetch_pass([self._first + number for number in wanted])


def new_tokens(batch: Batch) -> list[NewTokens]:
    """Return what a network is asked about of a pass; nothing if it is large: reads on demand keep the disk busy."""
    if batch.num_tokens > MAX_TOKENS:
        return []
    return [tokens for entry in batch.entries if (tokens := NewTokens.of(entry)) is not None]
