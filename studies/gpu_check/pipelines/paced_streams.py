"""Stands in for `torch.cuda` with streams that take emulated time: a launch returns at once, its work ends later.

The real work is done when it is launched. Each stream has a clock. A launch begins when its stream is free, when the
events that the stream waits for have happened, and not before it is launched. An event happens at the clock of its
stream; a thread that waits for it sleeps until then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch


class PacedStream:
    """A queue of launched work."""

    def __init__(self) -> None:
        self.free_at_s = 0.0

    def wait_event(self, event: PacedEvent) -> None:
        """Begin further work after an event."""
        self.free_at_s = max(self.free_at_s, event.time_s)

    def wait_stream(self, other: PacedStream) -> None:
        """Begin further work after all of another stream."""
        self.free_at_s = max(self.free_at_s, other.free_at_s)

    def synchronize(self) -> None:
        """Wait for all work."""
        sleep_until(self.free_at_s)


class PacedEvent:
    """A time of a stream."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def record(self, stream: PacedStream | None = None) -> None:
        """Take the time at which the stream's work ends."""
        self.time_s = time.perf_counter() if stream is None else stream.free_at_s

    def synchronize(self) -> None:
        """Wait for it."""
        sleep_until(self.time_s)

    def elapsed_time(self, later: PacedEvent) -> float:
        """Return the milliseconds until a later event."""
        return 1000 * (later.time_s - self.time_s)


class PacedStreams:
    """What `CudaDevice` uses of `torch.cuda`."""

    def __init__(self) -> None:
        self._streams: list[PacedStream] = []

    def Stream(self, _: torch.device) -> PacedStream:
        """Make a stream."""
        self._streams.append(PacedStream())
        return self._streams[-1]

    def Event(self, **_: Any) -> PacedEvent:
        """Make an event."""
        return PacedEvent()

    def current_stream(self, _: torch.device) -> PacedStream:
        """Return a stream without work."""
        return PacedStream()

    @contextmanager
    def stream(self, stream: PacedStream) -> Iterator[None]:
        """Launch on a stream: not before now. The block adds the seconds of the work to `free_at_s`."""
        stream.free_at_s = max(stream.free_at_s, time.perf_counter())
        yield

    def device(self, _: torch.device) -> nullcontext[None]:
        """Choose a device."""
        return nullcontext()

    def synchronize(self, _: torch.device | None = None) -> None:
        """Wait for all streams."""
        sleep_until(max(stream.free_at_s for stream in self._streams))

    def cudart(self) -> SimpleNamespace:
        """Return what page-locks memory."""
        return SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)

    def check_error(self, _: int) -> None:
        """Raise for an error."""


def sleep_until(moment_s: float) -> None:
    """Sleep until a moment of `time.perf_counter`."""
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
