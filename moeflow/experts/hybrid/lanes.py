"""The two streams of a GPU that hybrid experts use: one computes passes, the other one copies experts meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""


class Lanes(Protocol):
    """The streams, in an order that events define."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Start all work of the block on the stream for copies."""
        yield

    def copied(self) -> Event:
        """Return an event behind all copies so far."""

    def computed(self) -> Event:
        """Return an event behind all computation so far."""

    def copies_wait_for(self, event: Event) -> None:
        """Start later copies after an event."""

    def passes_wait_for(self, event: Event) -> None:
        """Start later computation after an event."""

    def check(self) -> None:
        """Raise: RuntimeError if the device has failed."""

    def synchronize(self) -> None:
        """Wait for both streams."""


class CudaLanes:
    """The current stream of a CUDA device, and one for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """See `Lanes.copying`."""
        with torch.cuda.stream(self._copies):
            yield

    def copied(self) -> Event:
        """See `Lanes.copied`."""
        event: Event = self._copies.record_event()
        return event

    def computed(self) -> Event:
        """See `Lanes.computed`."""
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def copies_wait_for(self, event: Any) -> None:
        """See `Lanes.copies_wait_for`."""
        self._copies.wait_event(event)

    def passes_wait_for(self, event: Any) -> None:
        """See `Lanes.passes_wait_for`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def check(self) -> None:
        """See `Lanes.check`."""
        torch.cuda.current_stream(self._device).query()

    def synchronize(self) -> None:
        """See `Lanes.synchronize`."""
        torch.cuda.synchronize(self._device)


class _Past:
    """An event on a device without streams."""

    def query(self) -> bool:
        """Return true."""
        return True

    def synchronize(self) -> None:
        """See `Event.synchronize`."""


class SerialLanes:
    """A device that does all work at once."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        """See `Lanes.copying`."""
        yield

    def copied(self) -> Event:
        """See `Lanes.copied`."""
        return _Past()

    def computed(self) -> Event:
        """See `Lanes.computed`."""
        return _Past()

    def copies_wait_for(self, event: Event) -> None:
        """See `Lanes.copies_wait_for`."""

    def passes_wait_for(self, event: Event) -> None:
        """See `Lanes.passes_wait_for`."""

    def check(self) -> None:
        """See `Lanes.check`."""

    def synchronize(self) -> None:
        """See `Lanes.synchronize`."""


def lanes_of(device: torch.device) -> Lanes:
    """Return the lanes of a device."""
    return CudaLanes(device) if device.type == "cuda" else SerialLanes()
