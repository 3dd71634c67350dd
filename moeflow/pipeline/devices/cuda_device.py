"""A CUDA device with a limit on its memory: streams for computing and for each direction of the link.

A copy waits for its own event in the lane's thread. Computing is only launched; successors on other streams wait for
the event at its end, as given by the tasks' dependencies. Tests check the order of launches with a stand-in for
`torch.cuda`.

Large buffers of the host are plain memory that CUDA page-locks: torch's own allocator of page-locked memory rounds
sizes up to powers of two.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from moeflow.core.errors import CapacityError
from moeflow.core.offload_config import CudaDeviceConfig
from moeflow.core.out_of_memory import out_of_memory_as
from moeflow.core.units import MIB, format_bytes
from moeflow.kernels.arrays import address
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.pipeline.devices.offload_device import DeviceMemory
from moeflow.pipeline.devices.staging import Staging

_LEAST_PINNED_BYTES: Final = 2 * MIB  # from which on memory has pages of its own


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
        memory = self._reserve(num_bytes, purpose).zero_()
        self._cuda.synchronize(self.torch_device)  # zeroed before another stream writes
        return memory

    def _reserve(self, num_bytes: int, purpose: str) -> Tensor:
        """Return [num_bytes] uint8 on the device, not set to anything. Raises: CapacityError."""
        self.memory.take(num_bytes, purpose)
        try:
            with out_of_memory_as(
                f"{purpose} need {format_bytes(num_bytes)}, but {self.torch_device} has less; other programs "
                "may use it. Allow less of its memory"
            ):
                return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except CapacityError:
            self.memory.give_back(num_bytes, purpose)
            raise

    def hold(self, source: Tensor, purpose: str) -> Tensor:
        """Return a copy of bytes of the host that stays on the device. Blocks: until all have arrived.

        Raises: CapacityError.
        """
        held = self._reserve(source.nbytes, purpose).view(source.shape)
        with self._staging.copying():
            self._staging.copy(held, source)
        return held

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self.torch_device, self.allocate_pinned, self._cuda)

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Return zeros [num_bytes] uint8 in page-locked main memory. Raises: CapacityError."""
        cudart = self._cuda.cudart()
        with out_of_memory_as(
            f"{format_bytes(num_bytes)} of main memory cannot be page-locked: free main memory, or allow more of the "
            "device's (--device cuda:SIZE), so that more experts stay there"
        ):
            memory = LazyMemory(max(num_bytes, _LEAST_PINNED_BYTES)).bytes
            with self._cuda.device(self.torch_device):  # or a context on the first GPU would be opened
                self._cuda.check_error(cudart.cudaHostRegister(address(memory), memory.nbytes, 0))
            weakref.finalize(memory, cudart.cudaHostUnregister, address(memory)).atexit = False
            return torch.from_numpy(memory)[:num_bytes]

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
        """Return a copy on the device. Blocks: until it has arrived."""
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._has_pinned).copy_(source)
        target = torch.empty(source.shape, dtype=source.dtype, device=self.torch_device)
        self.upload(target, pinned)
        self._record(target, self._compute)
        return target

    def _record(self, tensor: Tensor, stream: Any) -> None:
        """Have a tensor's memory reused only after the work that a stream has by the time the tensor is freed."""
        tensor.record_stream(stream)

    def to_host(self, source: Tensor) -> Tensor:
        """Return a copy in page-locked memory. Blocks: until it has arrived."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._has_pinned)
        self.download(target, source)
        return target

    @contextmanager
    def computing(self, num_bytes: int, flops: int) -> Iterator[None]:
        """Return a `with` block for launches of work on the device. Raises: CapacityError."""
        too_small = out_of_memory_as(
            f"{self.torch_device} is too small for a micro-batch's work: "
            f"{format_bytes(self.memory.used_bytes)} of {format_bytes(self.memory.capacity_bytes)} are in use. "
            "Take smaller micro-batches (--micro-batch) or fewer tokens in a pass, or allow more of its memory"
        )
        with too_small, self._launching(self._compute) as end:
            yield
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
