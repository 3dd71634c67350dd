"""Pipelines on the GPU in software: streams on which all work is done when it is launched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from moeflow.core.engine_config import EngineConfig
from moeflow.core.offload_config import CudaDeviceConfig, OffloadConfig
from moeflow.engine.offload import offloaded_model
from moeflow.pipeline.devices.cuda_device import CudaDevice
from tests.soft_gpu import device, kernels

EMULATED = "emulated:64MiB,1000,torch"  # what configurations are first made for: it computes in torch, too


class SoftStream:
    """A stream without a queue."""

    def wait_event(self, _: Any) -> None:
        """Wait for an event."""


class SoftEvent:
    """An event that has happened when it is recorded."""

    def __init__(self) -> None:
        self._time_s = 0.0

    def record(self, _: Any = None) -> None:
        """Note the time."""
        self._time_s = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for it."""

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

    def stream(self, _: SoftStream) -> nullcontext[None]:
        """Launch on a stream."""
        return nullcontext()

    def device(self, _: torch.device) -> nullcontext[None]:
        """Choose a device."""
        return nullcontext()

    def synchronize(self, _: torch.device | None = None) -> None:
        """Wait for everything."""

    def cudart(self) -> SimpleNamespace:
        """Return what page-locks memory."""
        return SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)

    def check_error(self, _: int) -> None:
        """Raise for an error."""


class SoftDevice(CudaDevice):
    """A device of pipelines in software."""

    def __init__(self, config: OffloadConfig) -> None:
        assert config.cuda is not None
        super().__init__(config.cuda, SoftStreams())

    def _record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Nothing outlives its launch here."""


def on_soft_gpu(config: EngineConfig) -> EngineConfig:
    """Return a configuration for `EMULATED` with the GPU in software in its place."""
    assert config.offload is not None
    capacity_bytes = config.offload.device.capacity_bytes
    cuda = CudaDeviceConfig(name=device.NAME, memory_bytes=capacity_bytes, capacity_bytes=capacity_bytes)
    return replace(config, offload=replace(config.offload, emulated=None, cuda=cuda))


@contextmanager
def soft_offloading() -> Iterator[None]:
    """Have pipelines run on the GPU in software in the block."""
    with mock.patch.object(offloaded_model, "make_device", SoftDevice), device.soft_gpu(), kernels.soft_kernels():
        yield
