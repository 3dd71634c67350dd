"""Reads of slabs into slots by threads of the extension, and the fetcher of experts during a pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import Array, address, row_stride
from moeflow.kernels.cpu import extension

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


@dataclass(frozen=True, slots=True)
class SlabPlaces:
    """Where slabs lie in a file: those of a layer one behind the other, each filled up to whole pages."""

    descriptor: int  # which stays open for as long as they are read
    is_direct: bool  # reads go past the page cache; otherwise its pages are given back
    layer_starts: Sequence[int]  # where those of each layer begin
    layer_bytes: Sequence[int]  # of each of these, without the filling
    slabs_per_layer: int
    checksums: Sequence[int]  # CRC-32 of each, compared when it is first read; none: not at all


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """What one thread read when."""

    thread: int  # as many as there are threads: somebody who waited
    slab: int
    num_bytes: int
    is_urgent: bool
    start_ns: int  # of the clock of `time.perf_counter_ns`
    end_ns: int


class SlabReads:
    """Reads under way: what somebody waits for before what may be needed, that in the order of layers."""

    def __init__(self, places: SlabPlaces, slots: Array, *, num_threads: int) -> None:
        """Take the memory of slots, [slots, bytes of whole pages] uint8. Without threads, only waiting callers read.

        Raises: RuntimeError if the system does not give that many threads.
        """
        self._slots = slots
        self._layers = array("q", places.layer_starts), array("q", places.layer_bytes)
        self._checksums = array("I", places.checksums)
        layer_starts, layer_bytes = (it.buffer_info()[0] for it in self._layers)
        self.handle = _cpu.SlabReader(
            descriptor=places.descriptor,
            is_direct=places.is_direct,
            layer_starts=layer_starts,
            layer_bytes=layer_bytes,
            num_layers=len(places.layer_starts),
            slabs_per_layer=places.slabs_per_layer,
            checksums=self._checksums.buffer_info()[0] if self._checksums else 0,
            memory=address(slots),
            slot_bytes=row_stride(slots),
            num_threads=num_threads,
        )

    @property
    def is_closed(self) -> bool:
        """Whether nothing is read any more."""
        closed: bool = self.handle.is_closed
        return closed

    def submit(self, slabs_and_slots: Sequence[tuple[int, int]], *, is_urgent: bool) -> None:
        """Queue the reads of slabs that are not being read yet. Few urgent ones are cut into pieces."""
        self.handle.submit(list(slabs_and_slots), is_urgent, waits_at_once=False)

    def cancel(self, slab: int) -> bool:
        """Take a slab back if its read has not begun: then return True, and it is not heard of again."""
        done: bool = self.handle.cancel(slab)
        return done

    def take_ended(self) -> list[tuple[int, int, bool]]:
        """Return the slabs whose reads have ended, their slots, and whether all of it was read and is undamaged."""
        ended: list[tuple[int, int, bool]] = self.handle.take_ended()
        return ended

    def keep_spans(self, keeps: bool) -> None:
        """Keep a log of reads from now on, and of waits in `SlotFetcher.end`; or end that and drop it."""
        self.handle.keep_spans(keeps)

    def take_spans(self) -> list[ReadSpan]:
        """Return the log of reads, if it is kept, and empty it."""
        return [ReadSpan(*span) for span in self.handle.take_spans()]

    def wait(self, seconds: float) -> bool:
        """Wait until a read has ended, and help; return False if none does in so long."""
        is_over: bool = self.handle.wait(seconds)
        return is_over

    def close(self) -> None:
        """End the threads. Reads that have not begun have ended with that. Blocks: until the others have."""
        self.handle.close()


class SlotFetcher:
    """Has experts come into slots while a pass of a `PackedDecoder` runs. Numbers are those over all layers."""

    def __init__(self, reads: SlabReads, table: NDArray[np.int32]) -> None:
        """Take the slot of each expert, [layers, experts], which the fetcher changes while it has slots."""
        if table.dtype != np.int32 or not table.flags.c_contiguous:
            raise ValueError("the table of slots must be contiguous and of 32 bits")
        self._memory = (reads, table)
        self._num_experts = table.size
        num_layers, num_experts = table.shape
        self.handle: Any = _cpu.ExpertFetcher(reads.handle, table.ctypes.data, num_layers, num_experts)

    def begin(
        self,
        free_slots: Sequence[int],
        worth: tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]] | None,
        *,
        max_prefetches: int,
        max_needed: int,
    ) -> None:
        """Lend free slots, the last one first to be taken, then those of the experts that are worth least.

        `worth` has, of each, what it is worth as long as the pass has yet to come to its layer, once it has used it
        (infinite: it stays), once it has not, and as 8 bits when it may leave, as in csrc/io/expert_fetcher.h; None:
        all stay. A layer that needs more than `max_needed` experts is left to the caller. Shapes: [all experts] each.
        """
        addresses = [0, 0, 0, 0]
        if worth is not None:
            kinds = (np.float64, np.float64, np.float64, np.uint8)
            kept = [np.ascontiguousarray(it, kind) for it, kind in zip(worth, kinds, strict=True)]
            if any(it.shape != (self._num_experts,) for it in kept):
                raise ValueError(f"each of {self._num_experts} experts needs a worth and an eviction rule")
            addresses = [it.ctypes.data for it in kept]  # they are copied
        self.handle.begin(list(free_slots), *addresses, max_prefetches, max_needed)

    def end(self) -> tuple[list[tuple[int, int, int]], int, int, float, list[tuple[int, int, int]]]:
        """Take the slots back; return what happened: (event, expert, slot) in order, late, misses, seconds of waiting.

        Events are those of csrc/io/expert_fetcher.h. Late and missing experts are counted for finished layers. At the
        end each wait: (layer, start_ns, end_ns), if a log of reads is kept.
        """
        found: tuple[list[tuple[int, int, int]], int, int, float, list[tuple[int, int, int]]] = self.handle.end()
        return found
