"""A CUDA device, of whose memory a given part may be used: one copy stream for each direction, pinned host memory.

Each call waits for its own event, in the thread of the lane that made it: other lanes go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.memory.offload_device import DeviceMemory


class CudaDevice:
    """An `OffloadDevice` with a GPU."""

    def __init__(self, capacity_bytes: int, device: torch.device | str = "cuda") -> None:
        self.memory = DeviceMemory(str(device), capacity_bytes)
        self._device = torch.device(device)
        self._up, self._down, self._compute = (_stream(self._device) for _ in range(3))

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        """Return zeros [num_bytes] uint8 on the device. Raises: CapacityError."""
        self.memory.take(num_bytes, purpose)
        try:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            torch.cuda.synchronize(self._device)  # zeroed before another stream writes
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(
                f"{purpose} need {format_bytes(num_bytes)}, which {self._device} does not have; other programs may "
                "use it: allow less of its memory"
            ) from error
        return memory

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Return zeros [num_bytes] uint8 in page-locked main memory. Raises: CapacityError."""
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise CapacityError(
                f"{format_bytes(num_bytes)} of main memory cannot be page-locked; raise the limit (ulimit -l), or keep "
                "more weights on the device"
            ) from error

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy to the device. Blocks: until it is there."""
        with _done_on(self._up):
            target.copy_(source, non_blocking=True)

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copy from the device. Blocks: until it is there."""
        with _done_on(self._down):
            target.copy_(source, non_blocking=True)

    def computing(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """Return a `with` block for work on the device, left when it is done."""
        return _done_on(self._compute)

    def computing_on_host(self, num_bytes: int, flops: int) -> AbstractContextManager[None]:
        """Return a `with` block that does nothing: the host takes the time it takes."""
        return nullcontext()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _done_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Launch what is in the block on a stream, and wait until that is done."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
        event.record(stream)
    event.synchronize()
