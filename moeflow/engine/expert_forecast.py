"""Reads ahead what a pass will need in all of its layers, before it begins: a trained network says so from its tokens.

That is SiDA's hash function (2310.18859, section 3.1), but for which experts compute: the model's own routers choose
these, so that no answer changes. A governor asks after every pass whether that pays, the network's own time included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request, RequestStatus
from moeflow.engine.governed_forecast import GovernedForecast, in_order_of_need
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.predict.governor import Governor
from moeflow.experts.prefetcher import MAX_TOKENS
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorState
from moeflow.models.layers.decoder import CausalLM


@dataclass(frozen=True, slots=True)
class _Followed:
    """How far a request's text has been taken up."""

    num_tokens: int
    state: PredictorState


class ExpertForecast(GovernedForecast):
    """Predicts and prefetches for passes of few tokens, while the governor allows it."""

    def __init__(self, predictor: ExpertPredictor, model: CausalLM, cache: ExpertCache, governor: Governor) -> None:
        super().__init__(cache, governor)
        self._predictor, self._model = predictor, model
        self._followed: dict[Request, _Followed] = {}

    def begin_pass(self, batch: Batch) -> None:
        """Start reading what the pass will probably need. Blocks: while the network computes."""
        self._before = None
        if batch.num_tokens > MAX_TOKENS:  # reads on demand keep the disk busy
            return
        self._before = self._cache.stats()
        if self._governor.is_on:
            self._cache.prefetch_pass(self.experts_of(batch.entries))

    @torch.inference_mode()
    def experts_of(self, entries: Sequence[BatchEntry]) -> list[int]:
        """Return what tokens of a pass will probably need, drafted ones left out: numbers over all layers, in order.

        As many for each token as its router chooses; of a layer those first that are likely for more tokens.
        """
        shape = self._predictor.shape
        probabilities = self._logits(entries).softmax(-1)
        likeliest = probabilities.topk(shape.top_k, dim=-1)
        wanted = torch.zeros_like(probabilities).scatter_(-1, likeliest.indices, likeliest.values).sum(0)
        return in_order_of_need(wanted)

    def _logits(self, entries: Sequence[BatchEntry]) -> Tensor:
        """Take up what is new of each request; return logits for the pass's tokens. Shapes: -> [T, layers, E]."""
        self._followed = {
            request: followed
            for request, followed in self._followed.items()
            if request.status is not RequestStatus.FINISHED
        }
        by_length: dict[int, list[tuple[BatchEntry, PredictorState]]] = defaultdict(list)
        for entry in entries:
            num_seen, state = self._start(entry)
            by_length[entry.stop - num_seen].append((entry, state))
        return torch.cat([self._take_up(num_new, group) for num_new, group in by_length.items()])

    def _start(self, entry: BatchEntry) -> tuple[int, PredictorState]:
        """Return from where on an entry's text is taken up, and what is known until there.

        What was not followed for long, or is computed again, is taken up anew, no further back than attention sees.
        """
        earliest = max(entry.stop - self._predictor.shape.window, 0)
        followed = self._followed.get(entry.request)
        if followed is not None and earliest <= followed.num_tokens <= entry.start:
            return followed.num_tokens, followed.state
        return min(earliest, entry.start), self._predictor.begin()

    def _take_up(self, num_new: int, group: Sequence[tuple[BatchEntry, PredictorState]]) -> Tensor:
        token_ids = [entry.request.token_ids(entry.stop - num_new, entry.stop) for entry, _ in group]
        embeddings = self._model.embed(torch.tensor(token_ids).flatten()).float()
        by_text = embeddings.view(len(group), num_new, -1)
        logits, states = self._predictor.go_on(by_text, [state for _, state in group])
        for (entry, _), state in zip(group, states, strict=True):
            self._followed[entry.request] = _Followed(entry.stop, state)
        return torch.cat([of_text[-entry.num_tokens :] for of_text, (entry, _) in zip(logits, group, strict=True)])
