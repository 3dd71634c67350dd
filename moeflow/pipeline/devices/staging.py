"""Copies numbers of main memory to a GPU through page-locked buffers, so that no copy waits for another one.

Several threads share the buffers. While one buffer crosses the link, threads read and convert numbers for others. A
buffer is filled again only after its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor

from moeflow.core.out_of_memory import out_of_memory_as
from moeflow.core.units import MIB, format_bytes

BUFFER_BYTES: Final = 4 * MIB  # copies of this size, one behind the other, keep a link busy
NUM_BUFFERS: Final = 8


def page_locked(num_bytes: int) -> Tensor:
    """Return [num_bytes] uint8 in page-locked memory, for sizes that are powers of two. Raises: CapacityError."""
    with out_of_memory_as(f"{format_bytes(num_bytes)} of main memory cannot be page-locked: free main memory"):
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Staging:
    """Page-locked buffers of a GPU, and the stream of their copies."""

    def __init__(
        self, device: torch.device, allocate: Callable[[int], Tensor] = page_locked, cuda: Any = torch.cuda
    ) -> None:
        """Allocate the buffers. `cuda` makes streams and events; tests pass a stand-in."""
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._buffers: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()  # each with the event at the end of its copy
        for _ in range(NUM_BUFFERS):
            self._buffers.put((allocate(BUFFER_BYTES), None))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Return a `with` block for copies. They follow all work launched so far; at its end all have arrived."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        try:
            yield
        finally:
            self._stream.synchronize()

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a `with` block for work on copied numbers: it follows the copies launched so far."""
        block: AbstractContextManager[Any] = self._cuda.stream(self._stream)
        return block

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Launch copies of numbers in main memory, converted to the target's type. `source` is free at return.

        Blocks: while all buffers are in use.
        """
        if not target.is_contiguous():
            for row, source_row in zip(target, source, strict=True):
                self.copy(row, source_row)
            return
        row, given = target.view(-1), source.reshape(-1)
        step = BUFFER_BYTES // target.itemsize
        for start in range(0, len(row), step):
            self._send(row[start : start + step], given[start : start + step])

    def _send(self, target: Tensor, source: Tensor) -> None:
        memory, end = self._buffers.get()
        try:
            if end is not None:
                end.synchronize()
            staged = memory[: target.nbytes].view(target.dtype).copy_(source)
            end = self._cuda.Event(blocking=True)
            with self.on_stream():
                target.copy_(staged, non_blocking=True)
            end.record(self._stream)
        finally:
            self._buffers.put((memory, end))
