"""A group that measures how long this rank waits for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from moeflow.parallel.group import Channel, Group


class WaitClock:
    """The time that a rank has waited so far, with what copying takes."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        # Receives what was waited for, from when until when, in nanoseconds of `time.perf_counter_ns`.
        self.on_wait: Callable[[str, int, int], None] | None = None

    @contextmanager
    def running(self, name: str = "") -> Iterator[None]:
        """Count the time that the block takes; `name` is that of the exchange."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.waited_s += end - start
            if self.on_wait is not None:
                self.on_wait(name, round(1e9 * start), round(1e9 * end))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time that the block takes, within `running`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s -= time.perf_counter() - start


class TimedGroup(Group):
    """Another group, whose collectives, subgroups and channels run a clock."""

    def __init__(self, group: Group, clock: WaitClock | None = None) -> None:
        """Take a group, and the clock that others run, too."""
        self._group = group
        self.clock = clock or WaitClock()

    @property
    def rank(self) -> int:
        """See `Group`."""
        return self._group.rank

    @property
    def size(self) -> int:
        """See `Group`."""
        return self._group.size

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """See `Group`."""
        with self.clock.running(name):
            return self._group.all_gather(name, tensor)

    def all_to_all(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Group`."""
        with self.clock.running(name):
            return self._group.all_to_all(name, parts)

    def barrier(self, name: str) -> None:
        """See `Group`."""
        with self.clock.running(name):
            self._group.barrier(name)

    def subgroup(self, ranks: Sequence[int]) -> TimedGroup:
        """See `Group`."""
        return TimedGroup(self._group.subgroup(ranks), self.clock)

    def channel(self, rank: int) -> TimedChannel:
        """See `Group`."""
        return TimedChannel(self._group.channel(rank), self.clock)

    def abort(self, reason: str) -> None:
        """See `Group`."""
        self._group.abort(reason)

    def close(self) -> None:
        """See `Group`."""
        self._group.close()


class TimedChannel(Channel):
    """Another channel, which runs a clock."""

    def __init__(self, channel: Channel, clock: WaitClock) -> None:
        self._channel, self._clock = channel, clock

    def send(self, name: str, tensor: Tensor) -> None:
        """See `Channel`."""
        with self._clock.running(name):
            self._channel.send(name, tensor)

    def receive(self, name: str, like: Tensor) -> Tensor:
        """See `Channel`."""
        with self._clock.running(name):
            return self._channel.receive(name, like)
