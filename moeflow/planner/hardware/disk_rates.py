"""How fast the disk is read past the page cache: random places of a file, by the size of reads and their depth."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moeflow.core.hardware import DISK, RAM, Link, LinkRate
from moeflow.core.units import KIB, MIB
from moeflow.kernels.lazy_memory import allocate_lazily

FILE_BYTES: Final = 256 * MIB
SIZES: Final = (256 * KIB, MIB, 4 * MIB)
DEPTHS: Final = (1, 2, 4, 8, 16)
MIN_S: Final = 0.1  # of one size and depth
NUM_SAMPLES: Final = 2  # of a file that is there
QUICK_FILE_BYTES: Final = 64 * MIB
QUICK_CASES: Final = ((MIB, 1), (MIB, 8), (4 * MIB, 1), (4 * MIB, 8))
BESIDE_COMPUTING: Final = (MIB, 8)  # size and depth


class DiskBench:
    """A file to read from. Made by `disk_bench`."""

    def __init__(self, descriptor: int, num_bytes: int, cases: Sequence[tuple[int, int]] = ()) -> None:
        """`cases` are sizes and depths; without, all of them."""
        self._descriptor = descriptor
        self._num_bytes = num_bytes
        wanted = cases or [(size, depth) for size in SIZES for depth in DEPTHS]
        self._samples: dict[tuple[int, int], list[float]] = {case: [] for case in wanted}
        self._overlaps: list[float] = []

    def sample(self) -> None:
        """Read with every size and depth, for a second or two. Raises: OSError."""
        for (size, depth), rates in self._samples.items():
            rates.append(self._rate(size, depth))

    def sample_overlap(self, compute: Callable[[], object]) -> None:
        """Read alone, compute alone, then do both at once. Raises: OSError."""
        reads_alone, computes_alone = self._rate(*BESIDE_COMPUTING), _calls_per_s(compute, lambda: False)
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(self._rate, *BESIDE_COMPUTING)
            computes = _calls_per_s(compute, reading.done)
            reads = reading.result()
        self._overlaps.append(overlap_of(computes / computes_alone, reads / reads_alone))

    @property
    def overlap(self) -> float:
        """How far reading and computing overlap, by the median of the samples; 0: not known."""
        return statistics.median(self._overlaps) if self._overlaps else 0.0

    def link(self) -> Link:
        """Return the medians of the samples, at least one."""
        rates = tuple(
            LinkRate(transfer_bytes=size, bytes_per_s=statistics.median(found), depth=depth)
            for (size, depth), found in self._samples.items()
        )
        return Link(source=DISK, target=RAM, rates=rates)

    def _rate(self, size: int, depth: int) -> float:
        num_places = self._num_bytes // size
        places = random.sample(range(num_places), num_places)  # not twice the same: a host caches reads
        memory = _page_aligned(depth * size)
        end = time.perf_counter() + MIN_S

        def read(index: int) -> int:
            done = 0
            for place in places[index::depth]:
                done += os.preadv(self._descriptor, [memory[index * size : (index + 1) * size]], place * size)
                if time.perf_counter() > end:
                    break
            return done

        with ThreadPoolExecutor(depth) as threads:
            start = time.perf_counter()
            total = sum(threads.map(read, range(depth)))
            return total / (time.perf_counter() - start)


def overlap_of(computing: float, reading: float) -> float:
    """Return the overlap of two things that reach these shares of their speeds while both are at work.

    Two that take T each alone take T (2 - overlap) concurrently: 1 if neither slows the other, 0 if they share.
    """
    together = computing + reading
    return min(max(2.0 - 2.0 / together, 0.0), 1.0) if together > 0 else 0.0


def _calls_per_s(run: Callable[[], object], is_over: Callable[[], bool]) -> float:
    """Return how often something is done a second, until it is over, or for as long as one measurement takes."""
    run()
    count, start = 0, time.perf_counter()
    while not count or (time.perf_counter() < start + MIN_S and not is_over()):
        run()
        count += 1
    return count / (time.perf_counter() - start)


@contextmanager
def disk_bench(
    folder: Path, file_bytes: int = FILE_BYTES, cases: Sequence[tuple[int, int]] = ()
) -> Iterator[DiskBench]:
    """Yield a file in a folder on the disk that counts; it is gone afterwards.

    Raises: OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="disk-", suffix=".tmp") as file:
        for _ in range(file_bytes // MIB):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        descriptor = _open_direct(Path(file.name))
        try:
            yield DiskBench(descriptor, file_bytes, cases)
        finally:
            os.close(descriptor)


def file_link(file: Path) -> Link | None:
    """Return how fast a file that is there is read; None if it is too small to tell. Blocks: for some three seconds.

    Raises: OSError.
    """
    if file.stat().st_size < 4 * max(SIZES):
        return None
    descriptor = _open_direct(file)
    try:
        bench = DiskBench(descriptor, file.stat().st_size)
        for _ in range(NUM_SAMPLES):
            bench.sample()
    finally:
        os.close(descriptor)
    return bench.link()


def _open_direct(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct reads
        return os.open(file, os.O_RDONLY)


def _page_aligned(num_bytes: int) -> memoryview:
    """Return memory as slots of experts have it: on huge pages, into which some disks read three times as fast."""
    storage = allocate_lazily(max(num_bytes + 4096, 4 * MIB))
    start = -storage.data_ptr() % 4096
    view: memoryview = storage[start : start + num_bytes].numpy().data
    return view
