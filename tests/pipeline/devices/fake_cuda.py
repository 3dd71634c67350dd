"""Stands in for `torch.cuda` where there is no GPU: nothing overlaps, but whatever a GPU might overlap is found.

Tensors are in main memory, and every operation is done at once. Each thread and each stream has a vector clock. A
launch comes after everything its thread knows. An event carries its stream's progress to each waiter. A task comes
after the ends of its predecessors in its pipeline. Two accesses to the same bytes, one of them a write, are a `Race` if
neither clock knows the other. A `Race` is also an access of the host to device memory, and freeing memory that a stream
may still use. Operations of the CPU extension are not seen: take bfloat16.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeflow.core.offload_config import CudaDeviceConfig
from moeflow.pipeline.devices.cuda_device import CudaDevice
from moeflow.pipeline.devices.offload_device import Seconds

Clock = dict[str, int]
STREAMS = ("up", "down", "compute")
COMPUTE = 2


class Race(AssertionError):
    """What could go wrong on a GPU."""


@dataclass(frozen=True)
class Access:
    """Something that was done to some bytes."""

    first: int
    end: int
    is_write: bool
    who: str
    tick: int
    what: str

    def __str__(self) -> str:
        return f"{self.who} {'writes' if self.is_write else 'reads'} bytes {self.first} to {self.end} ({self.what})"


class Clocks:
    """Who knows what of whom."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._clocks: dict[str, Clock] = {}

    def of(self, who: str) -> Clock:
        return self._clocks.setdefault(who, {who: 0})

    def learn(self, who: str, known: Clock) -> None:
        mine = self.of(who)
        for name, tick in known.items():
            mine[name] = max(mine.get(name, 0), tick)

    def tick(self, who: str) -> int:
        self.of(who)[who] += 1
        return self.of(who)[who]

    def all(self) -> Clock:
        return {name: clock[name] for name, clock in self._clocks.items()}


class Stream:
    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.cuda = cuda
        self.name = STREAMS[number % 3]

    def wait_event(self, event: Event) -> None:
        self.cuda.log.append((self.name, "waits for", event.name))
        with self.cuda.clocks.lock:
            self.cuda.clocks.learn(self.name, event.known)

    def wait_stream(self, other: Stream) -> None:
        with self.cuda.clocks.lock:
            self.cuda.clocks.learn(self.name, self.cuda.clocks.of(other.name))

    def synchronize(self) -> None:
        with self.cuda.clocks.lock:
            self.cuda.clocks.learn(self.cuda.here, self.cuda.clocks.of(self.name))


class Event:
    """Waiting for one that was never recorded is waiting for nothing, as on a GPU."""

    def __init__(self, cuda: FakeCuda, *, is_timer: bool = False) -> None:
        self.cuda = cuda
        self.is_timer = is_timer  # of a copy
        self.known: Clock = {}
        self.name = ""

    def record(self, stream: Stream) -> None:
        with self.cuda.clocks.lock:
            self.known = dict(self.cuda.clocks.of(stream.name))
            self.name = f"{stream.name} {self.cuda.clocks.tick(stream.name)}"
            self.known = dict(self.cuda.clocks.of(stream.name))
        if not self.is_timer:
            self.cuda.log.append((stream.name, "records", self.name))

    def elapsed_time(self, later: Event) -> float:
        assert self.name.split()[0] == later.name.split()[0], "times of two streams"
        return self.cuda.copy_ms

    def synchronize(self) -> None:
        self.cuda.log.append(("a thread", "waits for", self.name))
        self.cuda.on_wait()
        self.cuda.waits.append((self.cuda.here, self.name))
        with self.cuda.clocks.lock:
            self.cuda.clocks.learn(self.cuda.here, self.known)


@dataclass
class Memory:
    """One storage: its accesses and its owner."""

    is_on_device: bool
    alive: Tensor  # so that nothing else gets its address
    accesses: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)  # streams whose work the allocator waits for


class FakeCuda:
    """What `CudaDevice` uses of `torch.cuda`."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.log: list[tuple[str, str, str]] = []
        self.launchers: set[str] = set()  # threads
        self.waits: list[tuple[str, str]] = []  # (thread, event)
        self.memories: dict[int, Memory] = {}
        self.num_streams = 0
        self.current = threading.local()
        self.races: list[Race] = []
        self.pinned: dict[int, int] = {}  # address -> bytes that are page-locked
        self.refusal = ""  # of page-locking
        self.copy_ms = 1.0  # between two events that measure time
        self.on_wait: Callable[[], object] = lambda: None
        self.most_pinned: float = math.inf  # blocks; further ones are refused

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.pinned.pop)

    def _register(self, address: int, num_bytes: int, flags: int) -> str:
        if len(self.pinned) >= self.most_pinned:
            return "operation not supported (801)"
        self.pinned[address] = num_bytes
        return self.refusal

    def check_error(self, result: str) -> None:
        if result:
            raise RuntimeError(result)

    def record(self, tensor: Tensor, stream: Stream) -> None:
        if (memory := self.memories.get(tensor.untyped_storage().data_ptr())) is not None:
            memory.recorded.add(stream.name)

    def Stream(self, device: torch.device) -> Stream:
        self.num_streams += 1
        return Stream(self, self.num_streams - 1)

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self, COMPUTE)

    def Event(self, *, blocking: bool = False, enable_timing: bool = False) -> Event:
        assert blocking or enable_timing, "a thread that spins takes a core from those who compute"
        return Event(self, is_timer=enable_timing)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.launchers.add(self.here)
        with self.clocks.lock:
            self.clocks.learn(stream.name, self.clocks.of(self.here))
        before, self.current.stream = self.stream_here, stream.name
        try:
            yield
        finally:
            self.current.stream = before

    def synchronize(self, device: torch.device) -> None:
        self.log.append(("a thread", "waits for", "everything"))
        with self.clocks.lock:
            self.clocks.learn(self.here, self.clocks.all())
            for memory in self.memories.values():
                memory.accesses.clear()

    @property
    def here(self) -> str:
        return f"thread {threading.get_ident()}"

    @property
    def stream_here(self) -> str | None:
        return getattr(self.current, "stream", None)

    def watch(self, tensor: Tensor, *, is_on_device: bool) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address and tensor.numel():
            self.memories[address] = Memory(is_on_device, tensor.detach())

    def touch(self, tensor: Tensor, *, is_write: bool, what: str) -> None:
        """Note an access, and raise a Race if another one may happen at the same time."""
        memory = self.memories.get(tensor.untyped_storage().data_ptr())
        if memory is None or not tensor.numel():
            return
        with self.clocks.lock:
            who = self.stream_here or self.here
            if memory.is_on_device and self.stream_here is None:
                self._fail(f"the host touches memory of the device ({what})")
            first = tensor.storage_offset() * tensor.itemsize
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            access = Access(first, first + (last + 1) * tensor.itemsize, is_write, who, self.clocks.tick(who), what)
            known = self.clocks.of(who)
            for other in memory.accesses:
                overlaps = other.first < access.end and access.first < other.end
                if overlaps and (is_write or other.is_write) and known.get(other.who, 0) < other.tick:
                    self._fail(f"{access}, and nothing makes it wait until {other}")
            key = (access.first, access.end, is_write, who)
            memory.accesses = [a for a in memory.accesses if (a.first, a.end, a.is_write, a.who) != key]
            memory.accesses.append(access)

    def give_up(self, address: int) -> None:
        """Note a Race if a stream may still use memory without any reference left; Python swallows errors here."""
        with self.clocks.lock:
            memory = self.memories[address]
            waited_for = [self.clocks.of(who) for who in (self.here, *memory.recorded)]
            for access in memory.accesses:
                if all(known.get(access.who, 0) < access.tick for known in waited_for):
                    self.races.append(Race(f"memory is given up while {access}"))

    def _fail(self, message: str) -> None:
        self.races.append(Race(message))
        raise self.races[-1]


class Watching(TorchDispatchMode):
    """Reports every operation of a thread."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        given: set[int] = set()
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                given.add(tensor.untyped_storage().data_ptr())
                if not is_view:
                    self.cuda.touch(tensor, is_write=is_write, what=str(func))
        result = func(*args, **kwargs)
        if self.cuda.stream_here is not None and not is_view:
            for tensor in _tensors(result):
                if tensor.untyped_storage().data_ptr() not in given:
                    self.cuda.watch(tensor, is_on_device=True)
                    self.cuda.touch(tensor, is_write=True, what=str(func))
        return result


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


class WatchedDevice(CudaDevice):
    """A `CudaDevice` in main memory, all of whose tasks are watched."""

    def __init__(self, capacity_bytes: int = 2**26) -> None:
        self.cuda = FakeCuda()
        self._known: dict[int, Clock] = {}  # by task: what the host knows at its end
        self._start: Clock = {}
        super().__init__(CudaDeviceConfig(name="cpu", memory_bytes=0, capacity_bytes=capacity_bytes), self.cuda)

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        memory = super().allocate(num_bytes, purpose)
        self.cuda.watch(memory, is_on_device=True)
        return memory

    def pin(self, memory: Sequence[Tensor]) -> bool:
        is_pinned = super().pin(memory)
        for part in memory if is_pinned else ():
            self.cuda.watch(part, is_on_device=False)
        return is_pinned

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        memory = super().allocate_pinned(num_bytes)
        self.cuda.watch(memory, is_on_device=False)
        return memory

    def to_device(self, source: Tensor) -> Tensor:
        target = super().to_device(source)
        self._watch_end(target)
        return target

    def to_host(self, source: Tensor) -> Tensor:
        if source.untyped_storage().data_ptr() in self.cuda.memories:
            self._watch_end(source)
        return super().to_host(source)

    def _watch_end(self, tensor: Tensor) -> None:
        """Note whether a stream may still use a tensor when nothing else does."""
        if tensor.numel():
            weakref.finalize(tensor, self.cuda.give_up, tensor.untyped_storage().data_ptr()).atexit = False

    def _record(self, tensor: Tensor, stream: Stream) -> None:
        self.cuda.record(tensor, stream)

    def upload(self, target: Tensor, source: Tensor) -> Seconds:
        if target.untyped_storage().data_ptr() not in self.cuda.memories:
            self.cuda.watch(target, is_on_device=True)
        return super().upload(target, source)

    def download(self, target: Tensor, source: Tensor) -> None:
        self.cuda.watch(target, is_on_device=False)
        super().download(target, source)

    @contextmanager
    def ordered(self, task: int, after: Sequence[int]) -> Iterator[None]:
        cuda = self.cuda
        with cuda.clocks.lock:
            for known in (self._start, *(self._known[number] for number in after)):
                cuda.clocks.learn(cuda.here, known)
        with Watching(cuda), super().ordered(task, after):
            yield
        with cuda.clocks.lock:
            self._known[task] = dict(cuda.clocks.of(cuda.here))

    def synchronize(self) -> None:
        super().synchronize()
        with self.cuda.clocks.lock:
            self._known.clear()
            self._start = dict(self.cuda.clocks.of(self.cuda.here))
