"""Reads ahead what an encoder will need of its inputs: a lane beside the passes predicts it while inputs wait.

All tokens of an input are known when it is submitted, so one lane builds its table, of the experts that each token
will probably need in all layers, and the lane of the passes only looks it up: SiDA's hash-building thread and inference
thread (2310.18859, section 3.1). Here the encoder's own routers choose which experts compute: no answer changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moeflow.core.batch import Batch
from moeflow.core.request import Request, RequestStatus
from moeflow.engine.governed_forecast import GovernedForecast, in_order_of_need
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.predict.governor import Governor
from moeflow.models.expert_predictor.network import ExpertPredictor
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.trace import Label, Trace

HASH_BUILDING: Final = "hash building"


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """What an input will probably need.

    Shapes: experts [T, layers, K] int64, the likeliest first; alpha [T, layers, K] float32, their probabilities among
    all experts. Layers are the encoder's with experts.
    """

    experts: Tensor
    alpha: Tensor


class InputForecast(GovernedForecast):
    """Predicts for inputs that wait, and prefetches for the passes that encode them, while the governor allows it."""

    def __init__(
        self,
        predictor: ExpertPredictor,
        model: EncoderDecoderLM,
        cache: ExpertCache,
        governor: Governor,
        trace: Trace | None = None,
    ) -> None:
        """Start the lane; `close` ends it."""
        super().__init__(cache, governor)
        self._predictor, self._model = predictor, model
        self._tables: dict[Request, Future[ExpertTable]] = {}  # of inputs that wait, in the order in which they came
        self._lane = Lane(HASH_BUILDING, trace=trace)

    def expect(self, request: Request) -> None:
        """Have the table of a request's input built, which waits for its pass."""
        if request.num_encoder_tokens and self._governor.is_on:
            self._tables[request] = self._begun(request)

    def begin_pass(self, batch: Batch) -> None:
        """Start reading what the pass's inputs will probably need, then what those that wait will.

        Blocks: until the tables of the pass's inputs are there.
        """
        self._before = None
        inputs = [entry.request for entry in batch.entries if entry.start == 0 and entry.request.num_encoder_tokens]
        begun = [self._tables.pop(request, None) for request in inputs]
        self._tables = {
            request: table for request, table in self._tables.items() if request.status is not RequestStatus.FINISHED
        }
        if not inputs:
            return
        self._before = self._cache.stats()
        if not self._governor.is_on:
            return
        # What was not expected: its governor was off when it came, or it starts over after a preemption.
        tables = [table or self._begun(request) for request, table in zip(inputs, begun, strict=True)]
        now = self._ranked([table.result() for table in tables])
        waiting = [table.result() for table in self._tables.values() if table.is_done and table.error is None]
        self._cache.prefetch_pass(list(dict.fromkeys([*now, *self._ranked(waiting)])))

    def close(self) -> None:
        """End the lane. Blocks: until it is through with the input that it is at."""
        self._lane.close()

    def _begun(self, request: Request) -> Future[ExpertTable]:
        token_ids = request.token_ids(0, request.num_encoder_tokens)
        # Looked up in this thread: kernels have one team of threads, which the passes use.
        embeddings = self._model.embed(torch.tensor(token_ids, device=self._model.device)).float().cpu()
        return self._lane.submit(self._table, embeddings, label=Label(f"input of {len(token_ids)} tokens"))

    @torch.inference_mode()
    def _table(self, embeddings: Tensor) -> ExpertTable:
        """Ask the network about an input. Shapes: embeddings [T, H]."""
        probabilities = self._predictor(embeddings[None])[0].softmax(-1)
        alpha, experts = probabilities.topk(self._predictor.shape.top_k, dim=-1)
        return ExpertTable(experts, alpha)

    def _ranked(self, tables: Sequence[ExpertTable]) -> list[int]:
        """Return numbers over all layers, in order; of a layer those first that are likely for more tokens."""
        shape = self._predictor.shape
        wanted = torch.zeros(shape.num_layers, shape.num_experts)
        for table in tables:
            by_layer = (of.transpose(0, 1).flatten(1) for of in (table.experts, table.alpha))
            wanted.scatter_add_(-1, *by_layer)
        return in_order_of_need(wanted)
