"""Has another process compute with its experts: work is submitted at once, results are taken when they are there."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from moeflow.core.errors import GroupError
from moeflow.parallel.remote.expert_work import (
    RESULT,
    WORK,
    ExpertWork,
    Status,
    WorkResult,
    decode_result,
    encode_work,
    result_bytes,
    tensor_of,
)
from moeflow.parallel.remote.link_thread import LinkThread
from moeflow.parallel.tcp.link import Kind, Link, Message


class PendingWork:
    """Work that was submitted."""

    def __init__(self, client: WorkClient, layer: int, num_pairs: int) -> None:
        self.submitted_s = time.perf_counter()
        self.arrived_s = 0.0  # when the result was there
        self._client, self._layer, self._num_pairs = client, layer, num_pairs
        self._is_done = threading.Event()
        self._outcome: WorkResult | GroupError | None = None

    def result(self, timeout_s: float) -> WorkResult:
        """Return the result. Blocks: until it is there.

        Raises: GroupError if it does not come in time, which ends the client, or if the link has ended.
        """
        if not self._is_done.wait(timeout_s):
            self._client.end(
                f"{self._client.peer} has not sent the {RESULT} of MoE layer {self._layer} within {timeout_s:.3g} s: "
                "it is stopped or overloaded, or the network between is cut"
            )
            self._is_done.wait()
        if isinstance(self._outcome, GroupError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def settle(self, outcome: WorkResult | GroupError) -> None:
        """Receive what became of it. Raises: GroupError if the answer does not match the request."""
        if isinstance(outcome, WorkResult):
            expected = self._num_pairs if outcome.status is Status.DONE else 0
            if len(outcome.pairs) != expected:
                raise GroupError(f"{RESULT} has {len(outcome.pairs)} pairs where {expected} are expected")
        self.arrived_s = time.perf_counter()
        self._outcome = outcome
        self._is_done.set()


class WorkClient:
    """One link to an owner of experts. `submit` may be called from any thread."""

    def __init__(
        self, link: Link, hidden: int, num_experts: int, on_end: Callable[[GroupError], None] = lambda _: None
    ) -> None:
        """Take over a link whose other end is served by an `ExpertService`; `on_end` is called once, by its thread."""
        self.peer = link.peer
        self._hidden, self._num_experts = hidden, num_experts
        self._on_end = on_end
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, PendingWork] = {}
        self._failure: GroupError | None = None
        self._most_bytes = 0  # that a result may have
        self._thread = LinkThread(link, self, "expert results")

    def submit(self, work: ExpertWork) -> PendingWork:
        """Send work, at most `max_rows` of it. Blocks: no longer than copying takes."""
        num_pairs = int((work.expert_ids < self._num_experts).sum())
        pending = PendingWork(self, work.layer, num_pairs)
        number = next(self._numbers)
        with self._lock:
            if self._failure is not None:
                pending.settle(self._failure)
                return pending
            self._pending[number] = pending
            self._most_bytes = max(self._most_bytes, result_bytes(num_pairs, self._hidden))
        self._thread.send(WORK, encode_work(number, work))
        return pending

    def end(self, reason: str) -> None:
        """End the link; pending work fails with this reason."""
        self._thread.end(reason)

    def close(self) -> None:
        """End the link. Blocks: until its thread has ended."""
        self._thread.close("the client has closed")

    # Called by the link's thread.

    def take(self, message: Message) -> None:
        """See `MessageHandler`."""
        if (message.kind, message.label) != (Kind.MESSAGE, RESULT) or message.num_bytes > self._most_bytes:
            raise GroupError(f"{self.peer} sends {message.label!r} of {message.num_bytes} bytes, which is not expected")
        number, result = decode_result(tensor_of(message), self._hidden)
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is None:
            raise GroupError(f"{self.peer} sends a {RESULT} without a request")
        try:
            pending.settle(result)
        except GroupError as error:
            pending.settle(error)
            raise

    def ended(self, error: GroupError) -> None:
        """See `MessageHandler`."""
        with self._lock:
            self._failure = error
            pending, self._pending = self._pending, {}
        for each in pending.values():
            each.settle(error)
        self._on_end(error)
