"""A group for two computations that alternate: while one waits for other ranks, the other one computes.

Each collective first sends, then gives the turn to the other computation, and then waits. So all ranks begin and end
their collectives in the same order, and at most one collective is open while a rank computes. A rank with little work
in one computation continues with the other, without a barrier.

Source: the asynchronous runtime of ExpertFlow (3.2, figure 3.3).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from moeflow.core.errors import GroupError
from moeflow.kernels.interrupts import hold_interrupts
from moeflow.parallel.group import Channel, Group, OverlappingGroup
from moeflow.parallel.timed_group import WaitClock

Result = TypeVar("Result")


class AlternatingGroup(Group):
    """Another group; within `run` it has a second one of the same ranks, for the second computation."""

    def __init__(self, group: OverlappingGroup, clock: WaitClock) -> None:
        """Take a group; `clock` stops while a waiting computation has no turn."""
        self._groups = (group, group.subgroup(range(group.size)))
        for lane, each in enumerate(self._groups):
            each.meanwhile = partial(self._give_turn, lane)
        self._clock = clock
        self._lane = 0  # that has the turn
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._num_running = 1
        self._failure: BaseException | None = None
        num_threads = torch.get_num_threads()  # a new thread would use all cores
        self._thread = ThreadPoolExecutor(1, "micro-batch", partial(torch.set_num_threads, num_threads))

    @property
    def rank(self) -> int:
        """See `Group`."""
        return self._groups[0].rank

    @property
    def size(self) -> int:
        """See `Group`."""
        return self._groups[0].size

    def run(self, first: Callable[[], Result], second: Callable[[], Result]) -> list[Result]:
        """Return the results of both, which do the same collectives; `first` is always one collective ahead.

        A Ctrl-C waits for the end. Raises: what one of them raises first; then the other one stops.
        """
        self._num_running, self._failure = 2, None
        with hold_interrupts():
            waiting = self._thread.submit(self._run_lane, 1, second)
            found = self._run_lane(0, first)
            other = waiting.result()
        self._lane, self._num_running = 0, 1
        if self._failure is not None:
            raise self._failure
        return [*found, *other]

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """See `Group`."""
        return self._groups[self._lane].all_gather(name, tensor)

    def all_to_all(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Group`."""
        return self._groups[self._lane].all_to_all(name, parts)

    def barrier(self, name: str) -> None:
        """See `Group`."""
        self._groups[self._lane].barrier(name)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """See `Group`."""
        return self._groups[0].subgroup(ranks)

    def channel(self, rank: int) -> Channel:
        """See `Group`."""
        return self._groups[0].channel(rank)

    def abort(self, reason: str) -> None:
        """See `Group`."""
        self._groups[0].abort(reason)

    def close(self) -> None:
        """End the thread. The creator of the group closes the group."""
        self._thread.shutdown()

    def _run_lane(self, lane: int, compute: Callable[[], Result]) -> list[Result]:
        """Return the result, or nothing after a failure."""
        try:
            if lane == 1:
                self._turns[1].acquire()
                self._check()
            return [compute()]
        except BaseException as error:
            self._failure = self._failure or error
            return []
        finally:
            self._num_running -= 1
            if self._num_running:
                self._lane = 1 - lane
                self._turns[1 - lane].release()

    def _give_turn(self, lane: int) -> None:
        """Let the other computation continue until it waits, too."""
        if self._num_running == 1:
            return
        with self._clock.paused():
            self._lane = 1 - lane
            self._turns[1 - lane].release()
            self._turns[lane].acquire()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise GroupError("the other micro-batch of the pass failed")
