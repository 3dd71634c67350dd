"""Stands in for the streams of the GPU in software: work is done when it is launched, copies to the host at a wait."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from moeflow.pipeline.devices.staging import Staging
from tests.soft_gpu.device import COUNTS


class SoftStream:
    """A stream without a queue."""

    def wait_event(self, _: Any) -> None:
        """Wait for an event."""

    def wait_stream(self, _: SoftStream) -> None:
        """Wait for another stream."""

    def synchronize(self) -> None:
        """Wait for all work, copies to the host included."""
        COUNTS.arrive()


class SoftEvent:
    """An event that has happened when it is recorded."""

    def __init__(self) -> None:
        self._time_s = 0.0

    def record(self, _: Any = None) -> None:
        """Note the time."""
        self._time_s = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for it, and so for copies to the host."""
        COUNTS.arrive()

    def elapsed_time(self, later: SoftEvent) -> float:
        """Return the milliseconds until a later event."""
        return 1000 * (later._time_s - self._time_s)


class SoftStreams:
    """Stands in for `torch.cuda`."""

    def Stream(self, _: torch.device) -> SoftStream:
        """Make a stream."""
        return SoftStream()

    def Event(self, **_: Any) -> SoftEvent:
        """Make an event."""
        return SoftEvent()

    def current_stream(self, _: torch.device) -> SoftStream:
        """Return a stream."""
        return SoftStream()

    def stream(self, _: SoftStream) -> nullcontext[None]:
        """Launch on a stream."""
        return nullcontext()

    def device(self, _: torch.device) -> nullcontext[None]:
        """Choose a device."""
        return nullcontext()

    def synchronize(self, _: torch.device | None = None) -> None:
        """Wait for everything."""
        COUNTS.arrive()

    def cudart(self) -> SimpleNamespace:
        """Return what page-locks memory."""
        return SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)

    def check_error(self, _: int) -> None:
        """Raise for an error."""


def soft_staging(device: torch.device) -> Staging:
    """Return buffers for copies to the device."""
    return Staging(device, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), SoftStreams())
