"""Stands in for the streams of the GPU in software, where work is done at once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from moeflow.pipeline.devices.staging import Staging


class SoftStream:
    """A stream, or an event at its end."""

    def wait_stream(self, other: SoftStream) -> None:
        pass

    def record(self, stream: SoftStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class SoftCuda:
    """What `Staging` uses of `torch.cuda`."""

    def Stream(self, device: torch.device) -> SoftStream:
        return SoftStream()

    def Event(self, *, blocking: bool) -> SoftStream:
        return SoftStream()

    def current_stream(self, device: torch.device) -> SoftStream:
        return SoftStream()

    def stream(self, stream: SoftStream) -> AbstractContextManager[None]:
        return nullcontext()


def soft_staging(device: torch.device) -> Staging:
    """Return buffers for copies to the device."""
    return Staging(device, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), SoftCuda())
