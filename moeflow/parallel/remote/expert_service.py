"""Computes with the experts that this process has for others, as their messages arrive and without any barrier.

All rows that have arrived for one layer are computed at once, so an expert is read from memory once for all of them.
Layers are served in the order of their first rows. A pair's result is the same bits whatever is computed with
it, as the kernels promise, and each client adds up its tokens' pairs itself.

Computing has a thread with its own team, independent of the process's other work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from moeflow.core.errors import GroupError
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.expert_slots import SlotExperts
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.parallel.remote.expert_work import (
    MAX_WORK_BYTES,
    RESULT,
    WORK,
    ExpertWork,
    Status,
    WorkResult,
    decode_work,
    encode_result,
    tensor_of,
)
from moeflow.parallel.remote.link_thread import LinkThread
from moeflow.parallel.tcp.link import Kind, Link, Message

_MAX_WAITING: Final = 16  # pieces of work of one client; a client with more does not wait for results
_MAX_ROWS: Final = 1024  # computed at once: more gain nothing and delay the others


class ExpertOwner(Protocol):
    """Whose experts are computed with."""

    hidden: int
    num_layers: int  # those with experts
    num_experts: int  # of a layer

    def held(self, layer: int) -> AbstractContextManager[tuple[PackedExperts, Mapping[int, int]]]:
        """Yield memory that holds experts of a layer, and each expert's row in it; nothing moves meanwhile."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A piece of work that waits."""

    client: ServedClient
    number: int
    work: ExpertWork
    arrived_s: float


class ExpertService:
    """The thread that computes, and the queue before it."""

    def __init__(self, num_threads: int) -> None:
        """Begin."""
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._queue: deque[_Arrived] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="expert service", daemon=True)
        self._thread.start()

    def serve(
        self, link: Link, owner: ExpertOwner, on_end: Callable[[GroupError], None] = lambda _: None
    ) -> ServedClient:
        """Take over a link to a client (a `WorkClient`); `on_end` is called once when it is gone."""
        return ServedClient(self, link, owner, on_end)

    def close(self) -> None:
        """Compute no more. Blocks until started work is complete."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # Called by the threads of links.

    def add(self, arrived: _Arrived) -> None:
        """Queue a piece of work."""
        with self._changed:
            self._queue.append(arrived)
            self._changed.notify_all()

    def drop(self, client: ServedClient) -> None:
        """Forget what a client that is gone has asked for."""
        with self._changed:
            self._queue = deque(it for it in self._queue if it.client is not client)

    # Below, the computing thread.

    def _run(self) -> None:
        extension.use_own_threads(self._num_threads)
        with torch.inference_mode():
            while together := self._next():
                self._compute(together)

    def _next(self) -> list[_Arrived]:
        """Return the next work, all of one layer. Blocks. Empty: the service ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return []
            first = self._queue[0]
            together: list[_Arrived] = []
            num_rows = 0
            for it in self._queue:
                if it.work.layer == first.work.layer and it.client.owner is first.client.owner:
                    num_rows += len(it.work.hidden)
                    if together and num_rows > _MAX_ROWS:
                        break
                    together.append(it)
            taken = {id(it) for it in together}
            self._queue = deque(it for it in self._queue if id(it) not in taken)
            return together

    def _compute(self, together: list[_Arrived]) -> None:
        start_s = time.perf_counter()
        owner = together[0].client.owner
        with owner.held(together[0].work.layer) as (experts, slots):
            ready = [it for it in together if not _asked(it.work, owner.num_experts) - slots.keys()]
            found = compute_pairs(experts, slots, [it.work for it in ready], owner.num_experts) if ready else []
        seconds = time.perf_counter() - start_s
        results = {id(it): pairs for it, pairs in zip(ready, found, strict=True)}
        for it in together:
            pairs = results.get(id(it))
            status = Status.ABSENT if pairs is None else Status.DONE
            pairs = torch.empty(0, owner.hidden) if pairs is None else pairs
            it.client.answer(it.number, WorkResult(status, pairs, start_s - it.arrived_s, seconds))


class ServedClient:
    """One client of a service: the handler of its link."""

    def __init__(
        self, service: ExpertService, link: Link, owner: ExpertOwner, on_end: Callable[[GroupError], None]
    ) -> None:
        self.owner = owner
        self._service = service
        self._on_end = on_end
        self._lock = threading.Lock()
        self._num_waiting = 0
        with self._lock:  # work may come, and be computed, before the thread is known here
            self._thread = LinkThread(link, self, "expert work")

    def answer(self, number: int, result: WorkResult) -> None:
        """Send a result."""
        with self._lock:
            self._num_waiting -= 1
        self._thread.send(RESULT, encode_result(number, result))

    def close(self, reason: str) -> None:
        """End the link, and tell the client why. Blocks: until its thread has ended."""
        self._thread.close(reason)

    def take(self, message: Message) -> None:
        """See `MessageHandler`."""
        if (message.kind, message.label) != (Kind.MESSAGE, WORK) or message.num_bytes > MAX_WORK_BYTES:
            raise GroupError(f"{message.label!r} of {message.num_bytes} bytes is not expected: {WORK} is")
        with self._lock:
            self._num_waiting += 1
            if self._num_waiting > _MAX_WAITING:
                raise GroupError(f"more than {_MAX_WAITING} pieces of {WORK} wait already")
        owner = self.owner
        number, work = decode_work(
            tensor_of(message), num_layers=owner.num_layers, num_experts=owner.num_experts, hidden=owner.hidden
        )
        self._service.add(_Arrived(self, number, work, time.perf_counter()))

    def ended(self, error: GroupError) -> None:
        """See `MessageHandler`."""
        self._service.drop(self)
        self._on_end(error)


def compute_pairs(
    experts: PackedExperts, slots: Mapping[int, int], works: Sequence[ExpertWork], num_experts: int
) -> list[Tensor]:
    """Return the weighted results of several pieces of work of one layer, [P, H] of each.

    `slots` has all experts that are asked for, and where in `experts` each is; one more than there are is no expert.
    """
    top_k = max(work.expert_ids.shape[1] for work in works)
    hidden = torch.cat([work.hidden for work in works]) if len(works) > 1 else works[0].hidden
    ids = _joined([work.expert_ids for work in works], top_k, num_experts)
    weights = _joined([work.weights for work in works], top_k, 0.0)
    pairs = torch.empty(ids.numel(), hidden.shape[1])
    wanted = {expert: slots[expert] for work in works for expert in _asked(work, num_experts)}
    SlotExperts(experts, num_experts + 1, wanted, experts.biases).pairs(hidden, ids, weights, pairs)
    rows = torch.split(pairs.view(len(hidden), top_k, -1), [len(work.hidden) for work in works])
    return [_of_experts(part, work, num_experts) for part, work in zip(rows, works, strict=True)]


def _of_experts(rows: Tensor, work: ExpertWork, num_experts: int) -> Tensor:
    """Return the results of a piece of work without those of the filler. Shapes: rows [n, K or more, H]."""
    return rows[:, : work.expert_ids.shape[1]][work.expert_ids < num_experts]


def _joined(parts: Sequence[Tensor], width: int, filler: float) -> Tensor:
    """Return tables one below the other, filled up to one width."""
    filled = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=filler) for part in parts]
    return torch.cat(filled) if len(filled) > 1 else filled[0].contiguous()


def _asked(work: ExpertWork, num_experts: int) -> set[int]:
    """Return the experts that a piece of work needs."""
    return set(work.expert_ids.flatten().tolist()) - {num_experts}
