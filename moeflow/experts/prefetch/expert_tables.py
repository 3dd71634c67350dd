"""Tables of the experts that encoder inputs will probably need, built by a thread while the inputs wait.

All tokens of an input are known at its submission. So one lane builds its table, and the lane of the passes only looks
experts up: SiDA's hash-building thread and inference thread (2310.18859, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moeflow.core.batch import Batch
from moeflow.core.request import Request, RequestStatus
from moeflow.experts.prefetch.followed_texts import Embed
from moeflow.kernels.cpu import extension
from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.trace import Label, Trace

HASH_BUILDING: Final = "hash building"


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The likely experts of an input.

    Shapes: experts [T, layers, K] int64, the likeliest first; alpha [T, layers, K] float32, their probabilities among
    all experts. Layers are the encoder's with experts.
    """

    experts: Tensor
    alpha: Tensor


class ExpertTables:
    """The tables of waiting inputs, and of the inputs in the pass that has begun."""

    def __init__(
        self, network: Callable[[Tensor], Tensor], embed: Embed, *, top_k: int, trace: Trace | None = None
    ) -> None:
        """Start the lane; `close` ends it. Tables have `top_k` experts of each token.

        `network` predicts from embeddings [1, T, H] the logits [1, T, layers, E] of experts.
        """
        self._network, self._embed, self._top_k = network, embed, top_k
        self._waiting: dict[Request, Future[ExpertTable]] = {}  # in the order of arrival
        self._batch: Batch | None = None  # of the pass that has begun
        self._of_pass: dict[Request, Future[ExpertTable] | None] = {}  # its inputs; None: the table has not begun
        self._lane = Lane(HASH_BUILDING, trace=trace)
        self._has_own_threads = not extension.is_available()  # whether the lane has threads of its own for kernels

    def expect(self, request: Request) -> None:
        """Begin the table of a request's input, if it has one."""
        if request.num_encoder_tokens and request not in self._waiting:
            self._waiting[request] = self._begun(request)

    def begin_pass(self, batch: Batch) -> None:
        """Take the inputs of a pass from the waiting ones. Further calls for the same batch change nothing."""
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
        """Return the tables of the pass's inputs, in order. Blocks: until they are complete."""
        # Some have not begun: nothing needed tables at the request's arrival, or it restarts after a preemption.
        self._of_pass = {request: table or self._begun(request) for request, table in self._of_pass.items()}
        return [table.result() for table in self._of_pass.values() if table is not None]

    def of_waiting(self) -> list[ExpertTable]:
        """Return the complete tables of waiting inputs, in the order of arrival."""
        return [table.result() for table in self._waiting.values() if table.is_done and table.error is None]

    def close(self) -> None:
        """End the lane. Blocks: until its current table is complete."""
        self._lane.close()

    def _begun(self, request: Request) -> Future[ExpertTable]:
        token_ids = request.token_ids(0, request.num_encoder_tokens)
        # Embedded in this thread: only one thread may use the kernels' common team, and this one does in passes.
        return self._lane.submit(self._table, self._embed(token_ids), label=Label(f"input of {len(token_ids)} tokens"))

    @torch.inference_mode()
    def _table(self, embeddings: Tensor) -> ExpertTable:
        """Predict the table of an input. Shapes: embeddings [T, H]."""
        if not self._has_own_threads:
            extension.use_own_threads(1)
            self._has_own_threads = True
        probabilities = self._network(embeddings[None])[0].softmax(-1)
        alpha, experts = probabilities.topk(self._top_k, dim=-1)
        return ExpertTable(experts, alpha)
