"""The interface of a device with less memory than the model: bytes within a cap, and copies to and from it.

Where copies block, each lane has a thread, and tasks overlap because lanes do. Where a device launches work, one thread
launches copies and computing: within `ordered`, they wait on the device for the work of other tasks. The host waits
where it computes with what came.
Source: MoE-Lightning 4.1 (transfers in one direction are sequential, directions are independent) and A.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes

Seconds: TypeAlias = Callable[[], float]


class OffloadDevice(Protocol):
    """A device beside a host."""

    @property
    def memory(self) -> DeviceMemory:
        """The device's used and free memory."""

    @property
    def torch_device(self) -> torch.device:
        """Torch's name of the device."""

    @property
    def launches(self) -> bool:
        """Whether copies and computing are only launched."""

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        """Return zeros [num_bytes] uint8 on the device. Raises: CapacityError."""

    def hold(self, source: Tensor, purpose: str) -> Tensor:
        """Return bytes of the host as kept on the device. Raises: CapacityError."""

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Return zeros [num_bytes] uint8 on the host that the link reads at full speed. Raises: CapacityError."""

    def pin(self, memory: Sequence[Tensor]) -> bool:
        """Have the link read memory of the host at full speed, where it lies. Return False if that cannot be."""

    def upload(self, target: Tensor, source: Tensor) -> Seconds:
        """Copy from pinned memory to the device. Blocks: until it has arrived, unless the device launches.

        Return its duration, without waits for other tasks. It is known once the device is idle.
        """

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copy from the device to the host. Blocks: as `upload`."""

    def to_device(self, source: Tensor) -> Tensor:
        """Return a copy on the device. Blocks: as `upload`."""

    def to_host(self, source: Tensor) -> Tensor:
        """Return a copy on the host. Blocks: as `upload`."""

    def computing(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """Return a `with` block for work on the device that reads so many bytes."""

    def exchanging(self, num_bytes: int) -> AbstractContextManager[None]:
        """Return a `with` block for an exchange with other devices, of so many bytes in each direction."""

    def ordered(self, task: int, after: Sequence[int]) -> AbstractContextManager[None]:
        """Return a `with` block for a task of a pass: its work on the device waits for that of other tasks.

        `after` has the numbers of tasks whose blocks have ended.
        """

    def synchronize(self) -> None:
        """Wait until all work is done, and clear the tasks. Blocks."""

    def computing_on_host(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """Return the same for work on the host's processor.

        Blocks: until all that the task comes after, and all that it launched, is done.
        """


class DeviceMemory:
    """Counts a device's used memory, which never exceeds the cap."""

    def __init__(self, device_name: str, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._name = device_name
        self._purposes: dict[str, int] = {}

    @property
    def free_bytes(self) -> int:
        """Unused bytes."""
        return self.capacity_bytes - self.used_bytes

    def take(self, num_bytes: int, purpose: str) -> None:
        """Count bytes as used. Raises: CapacityError if they do not fit."""
        if num_bytes > self.free_bytes:
            taken = ", ".join(f"{name} {format_bytes(size)}" for name, size in self._purposes.items())
            raise CapacityError(
                f"{purpose} need {format_bytes(num_bytes)} on {self._name}, which has {format_bytes(self.free_bytes)} "
                f"of {format_bytes(self.capacity_bytes)} left (in use: {taken or 'none'}). Allow more device memory, "
                "or take smaller micro-batches, fewer concurrent requests, or a smaller weight format"
            )
        self.used_bytes += num_bytes
        self._purposes[purpose] = self._purposes.get(purpose, 0) + num_bytes

    def give_back(self, num_bytes: int, purpose: str) -> None:
        """Count a purpose's bytes as free again."""
        self.used_bytes -= num_bytes
        self._purposes[purpose] -= num_bytes
        if not self._purposes[purpose]:
            del self._purposes[purpose]
