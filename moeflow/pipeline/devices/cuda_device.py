"""A CUDA device with a limit on its memory: streams for computing and for each direction of the link.

A copy waits for its own event in the lane's thread. Computing is only launched; successors on other streams wait for
the event at its end, as given by the tasks' dependencies. No GPU has run this code yet: tests check the order of
launches with a stand-in for `torch.cuda`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moeflow.core.errors import CapacityError
from moeflow.core.offload_config import CudaDeviceConfig
from moeflow.core.units import format_bytes
from moeflow.pipeline.devices.offload_device import DeviceMemory


class CudaDevice:
    """An `OffloadDevice` with a GPU."""

    def __init__(self, config: CudaDeviceConfig, cuda: Any = torch.cuda) -> None:
        """`cuda` makes streams and events; tests pass a stand-in."""
        self.torch_device = torch.device(config.name)
        self.memory = DeviceMemory(config.name, config.capacity_bytes)
        self._cuda = cuda
        self._up, self._down, self._compute = (cuda.Stream(self.torch_device) for _ in range(3))
        self._computed: dict[int, Any] = {}  # by task: the event at its end
        self._now = _Now()

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        """Return zeros [num_bytes] uint8 on the device. Raises: CapacityError."""
        self.memory.take(num_bytes, purpose)
        try:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)
            self._cuda.synchronize(self.torch_device)  # zeroed before another stream writes
        except torch.OutOfMemoryError as error:
            self.memory.give_back(num_bytes, purpose)
            raise CapacityError(
                f"{purpose} need {format_bytes(num_bytes)}, but {self.torch_device} has less; other programs "
                "may use it. Allow less of its memory"
            ) from error
        return memory

    def hold(self, source: Tensor, purpose: str) -> Tensor:
        """Return a copy of bytes of the host that stays on the device. Raises: CapacityError."""
        held = self.allocate(source.nbytes, purpose).view(source.shape)
        return held.copy_(source)

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Return zeros [num_bytes] uint8 in page-locked main memory. Raises: CapacityError."""
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._has_pinned)
        except RuntimeError as error:
            raise CapacityError(
                f"{format_bytes(num_bytes)} of main memory cannot be page-locked; raise the limit (ulimit -l), or keep "
                "more weights on the device"
            ) from error

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy to the device. Blocks: until it has arrived."""
        with self._launching(self._up) as end:
            target.copy_(source, non_blocking=True)
        end.synchronize()

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copy from the device. Blocks: until it has arrived."""
        with self._launching(self._down) as end:
            target.copy_(source, non_blocking=True)
        end.synchronize()

    def to_device(self, source: Tensor) -> Tensor:
        """Return a copy on the device; keep it until its computing ends. Blocks: until it has arrived."""
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._has_pinned).copy_(source)
        target = torch.empty(source.shape, dtype=source.dtype, device=self.torch_device)
        self.upload(target, pinned)
        return target

    def to_host(self, source: Tensor) -> Tensor:
        """Return a copy in page-locked memory. Blocks: until it has arrived."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._has_pinned)
        self.download(target, source)
        return target

    @contextmanager
    def computing(self, num_bytes: int, flops: int) -> Iterator[None]:
        """Return a `with` block for launches of work on the device. Raises: CapacityError."""
        try:
            with self._launching(self._compute) as end:
                yield
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.torch_device} is too small for a micro-batch's work: "
                f"{format_bytes(self.memory.used_bytes)} of {format_bytes(self.memory.capacity_bytes)} are in use. "
                "Take smaller micro-batches (--micro-batch) or fewer tokens in a pass, or allow more of its memory"
            ) from error
        if self._now.task is not None:
            self._computed[self._now.task] = end

    def computing_on_host(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """Return a `with` block that does nothing: the host needs no emulation."""
        return nullcontext()

    @contextmanager
    def ordered(self, task: int, after: Sequence[int]) -> Iterator[None]:
        """Return a `with` block whose copies and computing wait, on their streams, for the computing of tasks."""
        self._now.task = task
        self._now.after = [self._computed[number] for number in after if number in self._computed]
        try:
            yield
        finally:
            self._now.task, self._now.after = None, []

    def synchronize(self) -> None:
        """Wait until all work is done, and clear the tasks. Blocks."""
        self._cuda.synchronize(self.torch_device)
        self._computed.clear()

    @property
    def _has_pinned(self) -> bool:
        return self.torch_device.type == "cuda"

    @contextmanager
    def _launching(self, stream: Any) -> Iterator[Any]:
        """Launch the block on a stream, after the task's inputs; yield the event at its end."""
        end = self._cuda.Event(blocking=True)
        for before in self._now.after:
            stream.wait_event(before)
        with self._cuda.stream(stream):
            yield end
        end.record(stream)


class _Now(threading.local):
    """The task of a thread."""

    task: int | None = None
    after: Sequence[Any] = ()  # events
