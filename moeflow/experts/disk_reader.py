"""Reads experts from disk into slots by the extension's threads: demand first, then prefetches.

A few urgent reads are cut into pieces, to keep as many threads busy as many reads do. On a virtual disk of 1.3 to 3
GB/s, single experts of 6 MiB arrived 13% faster at its slowest, and 4% at its fastest. Ended reads are polled or
awaited: no thread of the reader calls Python.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final, Protocol

from moeflow.checkpoint.packed.layout import SlabIndex
from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.core.errors import StorageError
from moeflow.core.units import MIB
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.journal import SlotJournal
from moeflow.experts.cache.load_job import LoadJob, OnDone
from moeflow.experts.cache.worth import Worth
from moeflow.experts.slot_arena import SlotArena
from moeflow.experts.spans import COMPUTING, WAITS
from moeflow.kernels.cpu.slab_reads import SlabPlaces, SlabReads, SlotFetcher
from moeflow.pipeline.runtime.trace import Label, Trace, TraceRow

READ_DEPTHS: Final = (8, 4, 16)  # numbers of threads to probe, the preferred ones first
_CLEARLY: Final = 1.05
_PROBE_BYTES: Final = 64 * MIB  # of one round
_PROBE_S: Final = 0.15  # at most, for one round
_PROBE_ROUNDS: Final = 2
_PATIENCE_S: Final = 0.1  # of one wait: Python handles signals in between


class Slabs(Protocol):
    """A file of slabs; `SlabReader` is one."""

    index: SlabIndex
    is_direct: bool

    @property
    def descriptor(self) -> int:
        """The open file."""

    def read(self, number: int, into: memoryview, /) -> None:
        """Fill `into`, with retries. Raises: StorageError."""


class DiskReader:
    """Reads experts into the slots of an arena; a `Fetcher`. Callers hold the cache's lock, except in waits."""

    def __init__(
        self,
        slabs: Slabs,
        arena: SlotArena,
        *,
        num_threads: int,
        trace: Trace | None = None,
        layer_numbers: Sequence[int] = (),
    ) -> None:
        """Start the threads; `close` ends them.

        `layer_numbers` are those of the layers with experts among all layers, for the trace; none: the same.
        """
        spec = slabs.index.spec
        self._slabs = slabs
        self._arena = arena
        self._loads: dict[int, tuple[LoadJob, OnDone]] = {}  # under way, by the expert's number
        self._num_experts = spec.num_experts
        self._fetcher: SlotFetcher  # from `serve` on
        self._trace = trace or Trace(is_on=False)
        self._rows = _rows(self._trace, num_threads)
        self.computing = self._trace.row(COMPUTING)  # of the thread that computes
        self._numbers = layer_numbers or range(len(spec.layer_starts))
        places = SlabPlaces(
            descriptor=slabs.descriptor,
            is_direct=slabs.is_direct,
            layer_starts=spec.layer_starts,
            layer_bytes=spec.layer_bytes,
            slabs_per_layer=spec.num_experts,
            checksums=slabs.index.checksums[: spec.num_slabs],
        )
        self.reads = SlabReads(places, arena.slots, num_threads=num_threads)
        self._trace.follow(self.reads.keep_spans)

    def serve(self, cache: ExpertCache) -> None:
        """Report loads to a cache, and bring its experts while kernels run."""
        self._fetcher = SlotFetcher(self.reads, cache.kernel_reads.slot_table)
        cache.attach(self)

    @property
    def handle(self) -> Any:
        """The fetcher as kernels take it."""
        return self._fetcher.handle

    def begin(self, free_slots: Sequence[int], worth: Worth | None, *, max_prefetches: int, max_needed: int) -> None:
        """See `Fetcher`."""
        arrays = None if worth is None else (worth.before, worth.used, worth.unused, worth.may_leave)
        self._fetcher.begin(free_slots, arrays, max_prefetches=max_prefetches, max_needed=max_needed)

    def end(self) -> SlotJournal:
        """See `Fetcher`."""
        entries, num_late, num_misses, stall_s, waits = self._fetcher.end()
        if self._trace.is_on:
            for layer, start_ns, end_ns in waits:
                self.computing.record(Label(WAITS, self._numbers[layer]), start_ns, end_ns, is_blocked=True)
            self._record()
        return SlotJournal(entries, num_late, num_misses, stall_s)

    def start_loads(self, jobs: Sequence[LoadJob], on_done: OnDone) -> list[SlabLoad]:
        """Queue the reads of some experts; see `load_job.StartLoads`.

        Failed reads are retried; an error is a StorageError.
        """
        self.reads.submit([(job.expert, job.slot) for job in jobs], is_urgent=not jobs[0].is_prefetch)
        return [self.adopt(job, on_done) for job in jobs]

    def adopt(self, job: LoadJob, on_done: OnDone) -> SlabLoad:
        """Take over a load whose read is queued, or will be at once."""
        self._loads[job.expert] = (job, on_done)
        return SlabLoad(self, job)

    def drop(self, job: LoadJob) -> None:
        """Forget a load that has not ended, and never will."""
        self._loads.pop(job.expert, None)

    def outcome(self, job: LoadJob, *, is_right: bool) -> Exception | None:
        """Return the error of an ended load, after a retry if it failed."""
        self.drop(job)
        if is_right:
            return None
        if self.reads.is_closed:
            return StorageError("experts cannot be read: the engine is stopping")
        try:
            self._slabs.read(job.expert, self._arena.view(job.slot))
        except Exception as error:  # usually a StorageError
            return error
        except BaseException as error:  # the waiting pass must receive every error
            return StorageError(f"an expert could not be read: {type(error).__name__}: {error}")
        return None

    def poll(self) -> None:
        """Report ended loads."""
        for number, _, is_right in self.reads.take_ended():
            job, on_done = self._loads[number]
            on_done(job, self.outcome(job, is_right=is_right))
        if self._trace.is_on:
            self._record()

    def wait(self, condition: threading.Condition) -> None:
        """Wait until a load may have ended, which `poll` then reports. See `ExpertCache`."""
        if not self._loads:
            condition.wait()
            return
        condition.release()
        try:
            self.reads.wait(_PATIENCE_S)
        finally:
            condition.acquire()

    def close(self) -> None:
        """End the threads. Blocks: until the reads that have begun are done."""
        self.reads.close()
        self.poll()

    def _record(self) -> None:
        for span in self.reads.take_spans():
            name = "read" if span.is_urgent else "prefetch"
            label = Label(name, self._numbers[span.slab // self._num_experts], num_bytes=span.num_bytes)
            self._rows[span.thread].record(label, span.start_ns, span.end_ns)


class SlabLoad:
    """One expert's read."""

    def __init__(self, disk: DiskReader, job: LoadJob) -> None:
        self.job = job
        self._disk = disk

    def cancel(self) -> bool:
        """Cancel the read if it has not begun."""
        if not self._disk.reads.cancel(self.job.expert):
            return False
        self._disk.drop(self.job)
        return True


def _rows(trace: Trace, num_threads: int) -> list[TraceRow]:
    """Return a row for each thread, and one for waiting passes, which read meanwhile."""
    names = [f"disk {number}" for number in range(num_threads)]
    return [trace.row(name, lane="disk") for name in [*names, "disk, waiting pass"]]


def probe_read_depth(reader: SlabReader, arena: SlotArena, num_slots: int) -> int:
    """Return the fastest number of threads for this file: 8, unless 4 or 16 are clearly faster.

    Overwrites at most the first `num_slots` slots, so call it before they are used.

    Blocks: for a second at most, plus a read.
    """
    rates = dict.fromkeys(READ_DEPTHS, 0.0)
    chance = random.Random(0)
    for _ in range(_PROBE_ROUNDS):
        for depth in READ_DEPTHS:
            rates[depth] += _read_rate(reader, arena, depth, chance, num_slots)
    best = READ_DEPTHS[0]
    for depth in READ_DEPTHS[1:]:
        if rates[depth] > rates[best] * _CLEARLY:
            best = depth
    return best


def _read_rate(reader: SlabReader, arena: SlotArena, depth: int, chance: random.Random, num_slots: int) -> float:
    """Read random experts with `depth` threads; return bytes per second."""
    spec = reader.index.spec
    count = max(depth, _PROBE_BYTES // spec.slab_bytes)
    numbers = [chance.randrange(spec.num_slabs) for _ in range(count)]
    done = [0]
    start = perf_counter()

    def read_some(slot: int) -> None:
        while numbers and perf_counter() - start < _PROBE_S:
            try:
                number = numbers.pop()
                reader.fill(number, arena.view(slot))
            except (IndexError, OSError):  # another thread took the last; a pass that needs a bad expert reports it
                continue
            done.append(spec.part_bytes(number))

    threads = [threading.Thread(target=read_some, args=(slot,)) for slot in range(min(depth, num_slots))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (perf_counter() - start)
