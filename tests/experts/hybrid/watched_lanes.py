"""Two streams in main memory that find each access which nothing orders, by the vector clocks of `fake_cuda`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moeflow.experts.hybrid.hybrid_pool import HybridPool
from moeflow.kernels.cpu.device_flag import DeviceFlag
from moeflow.kernels.cpu.expert_slots import PresentExperts
from tests.pipeline.devices import fake_cuda


class Event(fake_cuda.Event):
    """An event that the host may ask about."""

    def __init__(self, lanes: WatchedLanes) -> None:
        super().__init__(lanes.cuda)
        self._lanes = lanes

    def query(self) -> bool:
        if not self._lanes.is_slow:
            for who in (self._lanes.cuda.here, self._lanes.cuda.stream_here):  # starts all later work after it
                if who is not None:
                    self._lanes.cuda.clocks.learn(who, self.known)
        return not self._lanes.is_slow


class WatchedLanes:
    """Lanes whose work is done at once, as soon as it is known to be ordered."""

    def __init__(self) -> None:
        self.cuda = fake_cuda.FakeCuda()
        self.is_slow = False  # whether copies are still under way
        self._copies, self._computing = fake_cuda.Stream(self.cuda, 0), fake_cuda.Stream(self.cuda, 2)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Start all work of the block on the stream of passes, and watch it."""
        with fake_cuda.Watching(self.cuda), self.cuda.stream(self._computing):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        with self.cuda.stream(self._copies):
            yield

    def copied(self) -> Event:
        return self._recorded(self._copies)

    def computed(self) -> Event:
        return self._recorded(self._computing)

    def copies_wait_for(self, event: Event) -> None:
        self._copies.wait_event(event)

    def passes_wait_for(self, event: Event) -> None:
        self._computing.wait_event(event)

    def check(self) -> None:
        pass

    def synchronize(self) -> None:
        self.cuda.synchronize(torch.device("cpu"))

    def watch(self, pool: HybridPool) -> None:
        """Watch the memory that both streams, or the GPU and the CPU, use."""
        buffers = [pool._mover._buffer, *([] if pool._stream is None else pool._stream._buffers)]
        on_gpu = [pool._tables.on_gpu, *(it._rows for it in buffers)]
        for experts in pool._layers.experts:
            on_gpu += [experts.matrices.gate_up, experts.matrices.down]
        if pool._stream is not None:
            for staging in pool._stream._staging.values():
                on_gpu += [staging.gate_up, staging.down]
        for tensor in on_gpu:
            self.cuda.watch(tensor, is_on_device=True)
        seam = pool._seam
        for buffer in buffers:
            self.cuda.watch(buffer._on_host, is_on_device=False)
        for tensor in (seam._hidden, seam._ids, seam._weights, seam._sums, seam._flag.memory):
            self.cuda.watch(tensor, is_on_device=False)

    def wait(self, flag: DeviceFlag, seconds: float) -> bool:
        """Stands in for the wait of a seam: the host then knows what the GPU did until it raised the flag."""
        memory = self.cuda.memories[flag.memory.untyped_storage().data_ptr()]
        raised = max(it.tick for it in memory.accesses if it.is_write and it.who == self._computing.name)
        self.cuda.clocks.learn(self.cuda.here, {self._computing.name: raised})
        return bool(flag.memory.numpy()[0])

    @contextmanager
    def host(self) -> Iterator[None]:
        """Work of the block is the host's, in a pass."""
        before, self.cuda.current.stream = self.cuda.stream_here, None
        try:
            yield
        finally:
            self.cuda.current.stream = before
            self.cuda.clocks.learn(self._computing.name, self.cuda.clocks.of(self.cuda.here))

    def _recorded(self, stream: fake_cuda.Stream) -> Event:
        event = Event(self)
        event.record(stream)
        return event


class WatchedSums(PresentExperts):
    """The CPU's kernels, whose accesses are noted."""

    lanes: WatchedLanes

    def sums(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> Callable[[], None]:
        compute = super().sums(x, topk_ids, topk_weights, out)

        def run() -> None:
            for tensor in (x, topk_ids, topk_weights):
                self.lanes.cuda.touch(tensor, is_write=False, what="CPU kernel")
            self.lanes.cuda.touch(out, is_write=True, what="CPU kernel")
            compute()

        return run
