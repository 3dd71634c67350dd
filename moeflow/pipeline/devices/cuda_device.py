"""A CUDA device with a limit on its memory: streams for computing and for each direction of the link.

Copies and computing are only launched. Successors on other streams wait for the event at their end, as given by the
tasks' dependencies; successors on the host wait for it in their thread. Tests check the order of launches with a
stand-in for `torch.cuda`.

Large buffers of the host are plain memory that CUDA page-locks: torch's own allocator of page-locked memory rounds
sizes up to powers of two.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import count
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor

from moeflow.core.errors import CapacityError
from moeflow.core.offload_config import CudaDeviceConfig
from moeflow.core.out_of_memory import out_of_memory_as
from moeflow.core.units import MIB, format_bytes
from moeflow.kernels.arrays import address
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.pipeline.devices.offload_device import DeviceMemory, Seconds
from moeflow.pipeline.devices.staging import Staging

_LEAST_PINNED_BYTES: Final = 2 * MIB  # from which on memory has pages of its own


class CudaDevice:
    """An `OffloadDevice` with a GPU."""

    launches = True

    def __init__(self, config: CudaDeviceConfig, cuda: Any = torch.cuda) -> None:
        """`cuda` makes streams and events; tests pass a stand-in."""
        self.torch_device = torch.device(config.name)
        self.memory = DeviceMemory(config.name, config.capacity_bytes)
        self._cuda = cuda
        self._up, self._down, self._compute = (cuda.Stream(self.torch_device) for _ in range(3))
        self._ends: dict[int, _Ends] = {}  # by task
        self._numbers = count()
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
        """Return a copy of bytes of the host that stays on the device. Blocks: as `fill`. Raises: CapacityError."""
        held = self._reserve(source.nbytes, purpose).view(source.shape)
        self.fill(held, source)
        return held

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes of the host to memory of the device. Blocks: until all have arrived."""
        with self._staging.copying():
            self._staging.copy(target, source)

    @cached_property
    def _between(self) -> Any:
        """The stream of exchanges with other devices."""
        return self._cuda.Stream(self.torch_device)

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self.torch_device, self.allocate_pinned, self._cuda)

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Return zeros [num_bytes] uint8 in page-locked main memory. Raises: CapacityError."""
        with out_of_memory_as(
            f"{format_bytes(num_bytes)} of main memory cannot be page-locked: free main memory, or allow more of the "
            "device's (--device cuda:SIZE), so that more experts stay there"
        ):
            memory = LazyMemory(max(num_bytes, _LEAST_PINNED_BYTES)).bytes
            self._register(address(memory), memory.nbytes)
            weakref.finalize(memory, self._cuda.cudart().cudaHostUnregister, address(memory)).atexit = False
            return torch.from_numpy(memory)[:num_bytes]

    def pin(self, memory: Sequence[Tensor]) -> bool:
        """Page-lock memory of the host where it lies, until the device is freed. Return False if that is refused."""
        pinned: list[Tensor] = []
        unpin = weakref.finalize(self, _unregister, self._cuda.cudart(), pinned)  # holds the memory until then
        unpin.atexit = False
        try:
            for part in memory:
                self._register(part.data_ptr(), part.nbytes)
                pinned.append(part)
        except RuntimeError:
            unpin()
            with suppress(RuntimeError):  # the first launch after a refusal repeats it
                torch.empty(1, device=self.torch_device).zero_()
            return False
        return True

    def _register(self, start: int, num_bytes: int) -> None:
        """Page-lock memory. Raises: RuntimeError."""
        with self._cuda.device(self.torch_device):  # or a context on the first GPU would be opened
            self._cuda.check_error(self._cuda.cudart().cudaHostRegister(start, num_bytes, 0))

    def upload(self, target: Tensor, source: Tensor) -> Seconds:
        """Launch a copy to the device, and return its duration by the device's clock."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        with self._launching(self._up):
            start.record(self._up)
            target.copy_(source, non_blocking=True)
            end.record(self._up)
        return lambda: start.elapsed_time(end) / 1000

    def download(self, target: Tensor, source: Tensor) -> None:
        """Launch a copy from the device."""
        with self._launching(self._down):
            target.copy_(source, non_blocking=True)

    def to_device(self, source: Tensor) -> Tensor:
        """Return a copy on the device, which is launched."""
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._has_pinned).copy_(source)
        target = torch.empty(source.shape, dtype=source.dtype, device=self.torch_device)
        self.upload(target, pinned)
        self._record(target, self._compute)
        return target

    def _record(self, tensor: Tensor, stream: Any) -> None:
        """Have a tensor's memory reused only after the work that a stream has by the time the tensor is freed."""
        tensor.record_stream(stream)

    def to_host(self, source: Tensor) -> Tensor:
        """Return a copy in page-locked memory, which is launched."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._has_pinned)
        self.download(target, source)
        self._record(source, self._down)
        return target

    def computing(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """Return a `with` block for launches of work on the device."""
        return self._launching(self._compute)

    @contextmanager
    def exchanging(self, num_bytes: int) -> Iterator[None]:
        """Return a `with` block that launches an exchange with other devices."""
        with self._launching(self._between):
            yield

    def computing_on_host(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """Return a `with` block for the host. Blocks: until the task's inputs, and all that it launched, are there."""
        for _, end in self._now.pending.values():
            end.synchronize()
        self._now.pending = {}
        return nullcontext()

    @contextmanager
    def ordered(self, task: int, after: Sequence[int]) -> Iterator[None]:
        """Return a `with` block whose copies and computing wait, on their streams, for the work of tasks.

        A task's end is that of its own launches. A task without any ends with its inputs.
        """
        pending: _Ends = {}
        for number in after:
            for stream, end in self._ends.get(number, {}).items():
                pending[stream] = max(pending.get(stream, end), end, key=itemgetter(0))
        self._now.pending = pending
        try:
            yield
        finally:
            self._ends[task], self._now.pending = self._now.pending, {}

    def synchronize(self) -> None:
        """Wait until all work is done, and clear the tasks. Blocks."""
        self._cuda.synchronize(self.torch_device)
        self._ends.clear()

    @property
    def _has_pinned(self) -> bool:
        return self.torch_device.type == "cuda"

    @contextmanager
    def _launching(self, stream: Any) -> Iterator[Any]:
        """Launch the block on a stream, after the task's inputs; yield the event at its end."""
        end = self._cuda.Event(blocking=True)
        for other, (_, before) in self._now.pending.items():
            if other is not stream:
                stream.wait_event(before)
        with self._cuda.stream(stream):
            yield end
        end.record(stream)
        self._now.pending = {stream: (next(self._numbers), end)}


def _unregister(cudart: Any, memory: Sequence[Tensor]) -> None:
    for part in memory:
        cudart.cudaHostUnregister(part.data_ptr())


class _Now(threading.local):
    """The task of a thread."""

    def __init__(self) -> None:
        self.pending: _Ends = {}  # work that the next launch, or the host, waits for


_Ends = dict[Any, tuple[int, Any]]  # by stream: number and event of the end of the latest work
