"""A device that does not exist: a cap on memory, and a link and processors with the speeds of a real one.

The emulation copies every byte in main memory and computes every product on this machine's processor. Then the caller
sleeps until the emulated time is up. So pipelines run, overlap and are tested everywhere. Where the real work is well
below the emulated time, times equal those of the emulated machine; `late_and_charged_s` measures the deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch
from torch import Tensor

from moeflow.core.errors import CapacityError
from moeflow.core.offload_config import EmulatedDeviceConfig
from moeflow.core.units import format_bytes
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.pipeline.devices.offload_device import DeviceMemory, Seconds
from moeflow.pipeline.devices.pace import Pace


class EmulatedDevice:
    """An `OffloadDevice` in main memory."""

    launches = False

    def __init__(self, config: EmulatedDeviceConfig) -> None:
        self.memory = DeviceMemory("the emulated device", config.capacity_bytes)
        self.speeds = config.speeds
        self.torch_device = torch.device("cpu")
        self._up, self._down, self._between, self._processor, self._host = (Pace() for _ in range(5))

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        """Return zeros [num_bytes] uint8 on the device. Raises: CapacityError."""
        self.memory.take(num_bytes, purpose)
        return _allocate(num_bytes)

    def hold(self, source: Tensor, purpose: str) -> Tensor:
        """Return the bytes themselves, which already lie in main memory. Raises: CapacityError."""
        self.memory.take(source.nbytes, purpose)
        return source

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Return zeros [num_bytes] uint8 in main memory. Raises: CapacityError."""
        return _allocate(num_bytes)

    def pin(self, memory: Sequence[Tensor]) -> bool:
        """Return False: weights are staged, as where memory cannot be page-locked."""
        return False

    def upload(self, target: Tensor, source: Tensor) -> Seconds:
        """Copy to the device, and return its duration. Blocks: as long as the link takes."""
        start = perf_counter()
        with self._up.lasting(seconds(source.nbytes, self.speeds.link)):
            target.copy_(source)
        duration_s = perf_counter() - start
        return lambda: duration_s

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copy from the device. Blocks: as long as the link takes, whose directions are independent."""
        with self._down.lasting(seconds(source.nbytes, self.speeds.link)):
            target.copy_(source)

    def to_device(self, source: Tensor) -> Tensor:
        """Return a copy on the device. Blocks: as `upload` does."""
        target = torch.empty_like(source)
        self.upload(target, source)
        return target

    def to_host(self, source: Tensor) -> Tensor:
        """Return a copy on the host. Blocks: as `download` does."""
        target = torch.empty_like(source)
        self.download(target, source)
        return target

    def computing(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """Return a `with` block for work on the device, which lasts as long as its slower part: bytes or FLOPs."""
        speeds = self.speeds
        return self._processor.lasting(
            max(seconds(num_bytes, speeds.device_bytes), seconds(flops, speeds.device_flops))
        )

    def computing_on_host(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """Return the same for work on the host's processor."""
        speeds = self.speeds
        return self._host.lasting(max(seconds(num_bytes, speeds.host_bytes), seconds(flops, speeds.host_flops)))

    def exchanging(self, num_bytes: int) -> AbstractContextManager[None]:
        """Return a `with` block for an exchange with other devices, which lasts as long as the link takes."""
        return self._between.lasting(seconds(num_bytes, self.speeds.link))

    def ordered(self, task: int, after: Sequence[int]) -> AbstractContextManager[None]:
        """Return a `with` block that does nothing: work is finished when its own block ends."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing, likewise."""

    @property
    def late_and_charged_s(self) -> tuple[float, float]:
        """The excess of real work over its emulated time so far, and that time: a ratio near 0 is exact."""
        paces = (self._up, self._down, self._between, self._processor, self._host)
        return sum(pace.late_s for pace in paces), sum(pace.charged_s for pace in paces)


def seconds(amount: int, per_second: float) -> float:
    """Return the emulated time of an amount; a speed of 0 takes none."""
    return amount / per_second if per_second else 0.0


def _allocate(num_bytes: int) -> Tensor:
    try:
        return allocate_lazily(num_bytes)
    except MemoryError as error:
        raise CapacityError(
            f"{format_bytes(num_bytes)} of main memory are not available for the emulated device: emulate less memory"
        ) from error
