"""Takes down what routers choose, pass by pass, with what predictors could have gone by.

That is the text of each request, and what the routers of the next layers would choose for what a layer gets. They run
in passes as small as those with prefetch. Their time does not count for the pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import numpy as np

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request, RequestStatus
from moeflow.experts.predict.predictor import MAX_LOOK_AHEAD, MAX_TOKENS, Routes
from moeflow.kernels.arrays import Array, on_host
from moeflow.workload.routing_recorder import RoutingRecorder
from moeflow.workload.routing_trace import ExpertIds, TextShare


class RoutingRecord:
    """What goes to a recorder from one runner's passes."""

    def __init__(self, recorder: RoutingRecorder) -> None:
        self.routers: Sequence[Routes] = ()  # of the layers with experts; none: not recorded
        self._recorder = recorder
        self._known: dict[Request, tuple[int, int]] = {}  # number of a request's text, and up to where it stands there
        self._numbers = count()
        self._num_layers = 0  # of the pass, so far
        self._asking_s = 0.0  # in it

    def begin_pass(self, batch: Batch) -> None:
        """Begin a pass."""
        self._num_layers, self._asking_s = 0, 0.0
        self._known = {
            request: known for request, known in self._known.items() if request.status is not RequestStatus.FINISHED
        }
        self._recorder.begin_pass([self._part(entry) for entry in batch.entries])

    def on_route(self, topk_ids: Array, hidden: Array | None) -> None:
        """Take down the choice of the next layer of a pass. Shapes: topk_ids [T, K], hidden [T, H], its input."""
        began_s = time.perf_counter()
        topk_ids = topk_ids[:, : self._recorder.top_k]  # a network in the place of routers may choose more
        self._recorder.add_layer(on_host(topk_ids), self._choices_ahead(topk_ids, hidden))
        self._num_layers += 1
        self._asking_s += time.perf_counter() - began_s

    def end_pass(self, *, num_generated: int, compute_s: float) -> None:
        """End a pass, which has taken so long."""
        self._recorder.end_pass(num_generated=num_generated, compute_s=max(compute_s - self._asking_s, 0.0))

    def drop_pass(self) -> None:
        """Forget a pass that did not come to its end."""
        self._recorder.drop_pass()
        self._known.clear()  # its unwritten texts are lost

    def close(self) -> None:
        """Release the file."""
        self._recorder.close()

    def _part(self, entry: BatchEntry) -> TextShare:
        number, end = self._known.get(entry.request) or (next(self._numbers), 0)
        known_from = min(end, entry.start)
        self._known[entry.request] = number, entry.stop
        return TextShare(
            number=number,
            known_from=known_from,
            start=entry.start,
            stop=entry.stop,
            num_rows=entry.num_rows,
            token_ids=entry.request.token_ids(known_from, entry.stop),
        )

    def _choices_ahead(self, topk_ids: Array, hidden: Array | None) -> ExpertIds | None:
        """Return what routers would choose, [A, T, K], 0 for layers behind the last one; None: none is asked."""
        if hidden is None or len(hidden) > MAX_TOKENS or not self.routers:
            return None
        asked = np.zeros((MAX_LOOK_AHEAD, *topk_ids.shape), dtype=np.int64)
        later = self.routers[self._num_layers + 1 : self._num_layers + 1 + MAX_LOOK_AHEAD]
        for row, router in zip(asked, later, strict=False):
            row[:] = on_host(router.route(hidden)[0])
        return asked
