"""What inputs of an encoder will need of experts: a lane beside the passes predicts it while inputs wait.

All tokens of an input are known when it is submitted, so one lane builds its table, of the experts that each token
will probably need in all layers, and the lane of the passes only looks it up: SiDA's hash-building thread and inference
thread (2310.18859, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moeflow.core.batch import Batch
from moeflow.core.request import Request, RequestStatus
from moeflow.kernels.cpu import extension
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


class InputTables:
    """The tables of inputs that wait, and of those in the pass that has begun."""

    def __init__(
        self, predictor: ExpertPredictor, model: EncoderDecoderLM, *, top_k: int, trace: Trace | None = None
    ) -> None:
        """Start the lane; `close` ends it. Tables have `top_k` experts of each token."""
        self.shape, self.top_k = predictor.shape, top_k
        self._predictor, self._model = predictor, model
        self._waiting: dict[Request, Future[ExpertTable]] = {}  # in the order in which they came
        self._batch: Batch | None = None  # of the pass that has begun,
        self._of_pass: dict[Request, Future[ExpertTable] | None] = {}  # whose inputs these are; None: not begun
        self._lane = Lane(HASH_BUILDING, trace=trace)
        self._has_own_threads = not extension.is_available()  # the lane, to compute with

    def expect(self, request: Request) -> None:
        """Have the table of a request's input built, which waits for its pass."""
        if request.num_encoder_tokens and request not in self._waiting:
            self._waiting[request] = self._begun(request)

    def begin_pass(self, batch: Batch) -> None:
        """Take the inputs that a pass encodes from those that wait; more than one may say so of the same pass."""
        if batch is self._batch:
            return
        self._batch = batch
        inputs = [entry.request for entry in batch.entries if entry.start == 0 and entry.request.num_encoder_tokens]
        self._of_pass = {request: self._waiting.pop(request, None) for request in inputs}
        self._waiting = {
            request: table for request, table in self._waiting.items() if request.status is not RequestStatus.FINISHED
        }

    @property
    def num_inputs(self) -> int:
        """How many inputs the pass encodes."""
        return len(self._of_pass)

    def of_pass(self) -> list[ExpertTable]:
        """Return the tables of the pass's inputs, in order. Blocks: until they are there."""
        # What was not expected: nobody asked for tables when it came, or it starts over after a preemption.
        self._of_pass = {request: table or self._begun(request) for request, table in self._of_pass.items()}
        return [table.result() for table in self._of_pass.values() if table is not None]

    def of_waiting(self) -> list[ExpertTable]:
        """Return those of inputs that wait, as far as they are there, in the order in which inputs came."""
        return [table.result() for table in self._waiting.values() if table.is_done and table.error is None]

    def close(self) -> None:
        """End the lane. Blocks: until it is through with the input that it is at."""
        self._lane.close()

    def _begun(self, request: Request) -> Future[ExpertTable]:
        token_ids = request.token_ids(0, request.num_encoder_tokens)
        # Looked up in this thread: kernels have one team of threads for all, which the passes use, but for the lane's.
        embeddings = self._model.embed(torch.tensor(token_ids, device=self._model.device)).float().cpu()
        return self._lane.submit(self._table, embeddings, label=Label(f"input of {len(token_ids)} tokens"))

    @torch.inference_mode()
    def _table(self, embeddings: Tensor) -> ExpertTable:
        """Ask the network about an input. Shapes: embeddings [T, H]."""
        if not self._has_own_threads:
            extension.use_own_threads(1)
            self._has_own_threads = True
        probabilities = self._predictor(embeddings[None])[0].softmax(-1)
        alpha, experts = probabilities.topk(self.top_k, dim=-1)
        return ExpertTable(experts, alpha)
