"""Devices of pipelines that note when they copied and computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from moeflow.core.offload_config import CudaDeviceConfig, EmulatedDeviceConfig, OffloadConfig
from moeflow.engine.offload import offloaded_model
from moeflow.pipeline.devices.cuda_device import CudaDevice
from moeflow.pipeline.devices.emulated_device import EmulatedDevice, seconds
from moeflow.pipeline.devices.offload_device import Seconds
from moeflow.pipeline.devices.pace import Pace
from studies.gpu_check import rehearsal
from studies.gpu_check.options import SOFTWARE
from studies.gpu_check.pipelines.paced_streams import PacedStream, PacedStreams

Spans = list[tuple[float, float]]  # seconds


class TimedCuda:
    """`torch.cuda` for a `CudaDevice`, with an event at both ends of whatever a stream does."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._names: dict[Any, str] = {}
        self._spans: dict[str, list[tuple[Any, Any]]] = {"up": [], "down": [], "compute": [], "loading": []}
        self._origin = cuda.Event(enable_timing=True)
        self._origin.record()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cuda, name)

    def Stream(self, device: torch.device) -> Any:
        """Make one; a device's are made in this order, the last ones to load weights."""
        stream, names = self._cuda.Stream(device), [*self._spans]
        self._names[stream] = names[min(len(self._names), len(names) - 1)]
        return stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Launch on a stream, between two events."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        with self._cuda.stream(stream):
            start.record(stream)
            yield
            end.record(stream)
        self._spans[self._names[stream]].append((start, end))

    def spans(self, name: str) -> Spans:
        """Return when a stream worked."""
        self._cuda.synchronize()
        since = self._origin.elapsed_time
        return [(since(start) / 1000, since(end) / 1000) for start, end in self._spans[name]]


class TimedGpu(CudaDevice):
    """A GPU that knows when it copied and computed."""

    def __init__(self, config: OffloadConfig) -> None:
        assert config.cuda is not None
        self._timed = TimedCuda(rehearsal.software_streams() if config.cuda.name == SOFTWARE else torch.cuda)
        super().__init__(config.cuda, self._timed)

    def _record(self, tensor: torch.Tensor, stream: Any) -> None:
        if tensor.is_cuda:
            super()._record(tensor, stream)

    def spans(self) -> tuple[Spans, Spans]:
        """Return when copies to the device and computing took place."""
        return self._timed.spans("up"), self._timed.spans("compute")


class TimedEmulation(EmulatedDevice):
    """An emulated device likewise."""

    def __init__(self, config: EmulatedDeviceConfig) -> None:
        super().__init__(config)
        self._copied: Spans = []
        self._computed: Spans = []

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Seconds:
        """See `OffloadDevice`."""
        start = time.perf_counter()
        duration = super().upload(target, source)
        self._copied.append((start, time.perf_counter()))
        return duration

    @contextmanager
    def computing(self, num_bytes: int, flops: int) -> Iterator[None]:
        """See `OffloadDevice`."""
        start = time.perf_counter()
        with super().computing(num_bytes, flops):
            yield
        self._computed.append((start, time.perf_counter()))

    def spans(self) -> tuple[Spans, Spans]:
        """Return when copies to the device and computing took place."""
        return self._copied, self._computed


class StreamedEmulation(CudaDevice):
    """An emulated device with the streams of a GPU: one thread launches, and work takes its time on the streams."""

    def __init__(self, config: EmulatedDeviceConfig) -> None:
        self._timed = TimedCuda(PacedStreams())
        super().__init__(_in_main_memory(config), self._timed)
        self._speeds, self._host, self._work_s = config.speeds, Pace(), 0.0

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Seconds:
        """See `OffloadDevice`."""
        self._work_s = duration_s = seconds(source.nbytes, self._speeds.link)
        super().upload(target, source)
        return lambda: duration_s

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `OffloadDevice`."""
        self._work_s = seconds(source.nbytes, self._speeds.link)
        super().download(target, source)

    @contextmanager
    def computing(self, num_bytes: int, flops: int) -> Iterator[None]:
        """See `OffloadDevice`."""
        speeds = self._speeds
        self._work_s = max(seconds(num_bytes, speeds.device_bytes), seconds(flops, speeds.device_flops))
        with super().computing(num_bytes, flops):
            yield

    def computing_on_host(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """See `OffloadDevice`."""
        super().computing_on_host(num_bytes, flops)
        speeds = self._speeds
        return self._host.lasting(max(seconds(num_bytes, speeds.host_bytes), seconds(flops, speeds.host_flops)))

    @contextmanager
    def _launching(self, stream: PacedStream) -> Iterator[Any]:
        with super()._launching(stream) as end:
            yield end
            stream.free_at_s += self._work_s
            self._work_s = 0.0

    def _record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Nothing outlives its launch here."""

    def spans(self) -> tuple[Spans, Spans]:
        """Return when copies to the device and computing took place."""
        return self._timed.spans("up"), self._timed.spans("compute")


def _in_main_memory(config: EmulatedDeviceConfig) -> CudaDeviceConfig:
    size = config.capacity_bytes
    return CudaDeviceConfig(name="cpu", memory_bytes=size, capacity_bytes=size)


TimedDevice = TimedGpu | TimedEmulation | StreamedEmulation


@contextmanager
def timed_devices(*, has_streams: bool = False) -> Iterator[list[TimedDevice]]:
    """Have models made in the block compute on devices that note times; yield these.

    `has_streams`: emulated devices launch work on streams.
    """
    devices: list[TimedDevice] = []
    before = offloaded_model.make_device
    emulation = StreamedEmulation if has_streams else TimedEmulation

    def make(config: OffloadConfig) -> TimedDevice:
        devices.append(TimedGpu(config) if config.emulated is None else emulation(config.emulated))
        return devices[-1]

    offloaded_model.make_device = make
    try:
        yield devices
    finally:
        offloaded_model.make_device = before


def at_once(some: Spans, others: Spans) -> float:
    """Return for how long both were at work; spans of each do not overlap among themselves."""
    return sum(max(min(end, last) - max(start, first), 0.0) for start, end in some for first, last in others)


def merged(spans: Spans) -> Spans:
    """Return the same time as spans that do not overlap among themselves."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
