"""Brings experts from disk into slots, in the threads of a lane: demand first, prefetches in what time is left.

The lane is passed in as a function that queues work, for it belongs to a higher floor. Few urgent reads are cut into
pieces, so that they keep as many threads busy as many do. One expert of 6 MiB at a time, on a virtual disk that gave
between 1.3 and 3 GB/s at different times, came faster by 13% at its slowest and by 4% at its fastest.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from time import perf_counter
from typing import Any, Final, Protocol

from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.core.errors import StorageError
from moeflow.core.units import MIB
from moeflow.experts.cache.load_job import LoadJob, OnDone
from moeflow.experts.slot_arena import SlotArena

READ_DEPTHS: Final = (8, 4, 16)  # threads to try; an earlier one is kept unless a later one is clearly faster
_CLEARLY: Final = 1.05
_PROBE_BYTES: Final = 64 * MIB  # of one round
_PROBE_S: Final = 0.15  # at most, for one round
_PROBE_ROUNDS: Final = 2


class ReadFuture(Protocol):
    """What becomes of queued work; `runtime.future.Future` is one."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed, if it is done and did."""

    def cancel(self) -> bool:
        """Take it back if it has not begun."""

    def on_done(self, callback: Callable[[Any], Any], /) -> None:
        """Call back when it is done, failed or cancelled."""


# Queues work of a lane: (work, whether a pass waits for it, expert number over all layers, bytes it reads).
SubmitRead = Callable[[Callable[[], None], bool, int, int], ReadFuture]


class DiskReader:
    """Reads experts into the slots of an arena."""

    def __init__(self, reader: SlabReader, arena: SlotArena, submit: SubmitRead, *, num_threads: int) -> None:
        """`num_threads` is what the lane behind `submit` has."""
        self._reader = reader
        self._arena = arena
        self._submit = submit
        self._num_threads = num_threads

    def start_loads(self, jobs: Sequence[LoadJob], on_done: OnDone) -> list[SlabLoad]:
        """Queue the reads of some experts; see `load_job.StartLoads`.

        A read that fails is tried again; if it keeps failing, its error is a StorageError.
        """
        loads = [SlabLoad(self._reader, job, self._arena.view(job.slot), on_done) for job in jobs]
        for load in loads:
            load.submit(self._submit, 1 if load.job.is_prefetch else self._num_threads // len(jobs))
        return loads


class SlabLoad:
    """One expert's read, in one or several pieces, of which the last to end checks the whole."""

    def __init__(self, reader: SlabReader, job: LoadJob, into: memoryview, on_done: OnDone) -> None:
        self.job = job
        self.has_begun = False
        self._reader = reader
        self._into = into
        self._on_done = on_done
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._num_pieces = 0  # still to end
        self._error: BaseException | None = None  # of a piece
        self._futures: list[ReadFuture] = []

    def submit(self, submit: SubmitRead, max_pieces: int) -> None:
        """Queue the pieces."""
        pieces = self._reader.pieces(self.job.expert, self._into, max_pieces)
        self._num_pieces = len(pieces)
        num_bytes = len(self._into) // len(pieces)
        for piece in pieces:
            work = self._unless_cancelled(piece)
            self._futures.append(submit(work, not self.job.is_prefetch, self.job.expert, num_bytes))
        for future in self._futures:
            future.on_done(self._end_piece)

    def cancel(self) -> bool:
        """Take all pieces back if none has begun."""
        with self._lock:
            if self.has_begun:
                return False
            self._is_cancelled = True
        for future in self._futures:
            future.cancel()
        return True

    def _unless_cancelled(self, piece: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            with self._lock:
                if self._is_cancelled:
                    return
                self.has_begun = True
            piece()

        return work

    def _end_piece(self, future: ReadFuture) -> None:
        with self._lock:
            self._error = self._error or future.error
            self._num_pieces -= 1
            if self._num_pieces or self._is_cancelled:
                return
        self._on_done(self.job, self._complete())

    def _complete(self) -> Exception | None:
        """Check what was read, or read it again; return what is wrong in the end."""
        try:
            if self._error is not None:
                raise self._error
            self._reader.check(self.job.expert, self._into)
        except OSError:
            try:
                self._reader.read(self.job.expert, self._into)
            except Exception as error:  # as a rule a StorageError
                return error
        except CancelledError:
            return StorageError("experts are not read any more: the engine is stopping")
        except BaseException as error:  # whatever it is, the pass that waits must receive it
            return StorageError(f"an expert could not be read: {type(error).__name__}: {error}")
        return None


def probe_read_depth(reader: SlabReader, arena: SlotArena, num_slots: int) -> int:
    """Return how many threads read this file fastest: 8, unless 4 or 16 are clearly better here.

    Reads into the first `num_slots` at most, so it comes before they are used.

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
    """Read random experts with so many threads, and return bytes per second."""
    spec = reader.index.spec
    count = max(depth, _PROBE_BYTES // spec.stride_bytes)
    numbers = [chance.randrange(spec.num_slabs) for _ in range(count)]
    done = [0]
    start = perf_counter()

    def read_some(slot: int) -> None:
        while numbers and perf_counter() - start < _PROBE_S:
            try:
                number = numbers.pop()
                reader.pieces(number, arena.view(slot), 1)[0]()
            except (IndexError, OSError):  # another thread took the last; a bad expert is for who needs it to report
                continue
            done.append(spec.stride_bytes)

    threads = [threading.Thread(target=read_some, args=(slot,)) for slot in range(min(depth, num_slots))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (perf_counter() - start)
