"""Cache, reader, threads and a real file combined; and every possible end of a read."""

from __future__ import annotations

import os
import random
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moeflow.checkpoint.packed.reader as slab_reader
from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.core.errors import StorageError
from moeflow.core.units import MIB
from moeflow.experts.cache.eviction import LRU
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.load_job import LoadJob
from moeflow.experts.disk_reader import READ_DEPTHS, DiskReader, probe_read_depth
from moeflow.experts.slot_arena import SlotArena
from moeflow.kernels.cpu import extension
from moeflow.pipeline.runtime.trace import Trace
from tests.checkpoint.packed.slabs import flip_bit, make_spec, slab, write_packed_weights_file

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


class Machine:
    """A file of packed weights, slots, and what reads. Without threads, only waiting reads, and in order."""

    def __init__(self, folder, *, num_slots=6, num_threads=1, **spec):
        self.spec = make_spec(**({"slab_bytes": 5000} | spec))
        self.arena = SlotArena(num_slots, self.spec.slab_bytes)
        self.slabs = SlabReader(write_packed_weights_file(folder / "model.slabs", self.spec), self.arena.view(0))
        self.trace = Trace()
        self.reader = DiskReader(self.slabs, self.arena, num_threads=num_threads, trace=self.trace)
        self.done = []  # (expert, error)
        self.lock = threading.Condition()

    def start(self, *experts, is_prefetch=False, first_slot=0):
        jobs = [LoadJob(expert, slot, is_prefetch=is_prefetch) for slot, expert in enumerate(experts, first_slot)]
        return self.reader.start_loads(jobs, lambda job, error: self.done.append((job.expert, error)))

    def wait_for(self, count):
        with self.lock:
            while len(self.done) < count:
                self.reader.wait(self.lock)
                self.reader.poll()
        return dict(self.done)

    def content(self, slot):
        return bytes(self.arena.view(slot)[: self.spec.slab_bytes])

    def slab(self, expert):
        return slab(self.spec, *divmod(expert, self.spec.num_experts))

    def spans(self):
        return [span for row in self.trace.rows for span in row.spans]

    def close(self):
        self.reader.close()
        self.slabs.close()


@pytest.fixture
def machine(tmp_path):
    made = []

    def make(**options):
        made.append(Machine(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("num_threads", [0, 1, 4])
@pytest.mark.parametrize("is_direct", [True, False])
def test_slabs_land_in_their_slots(machine, monkeypatch, num_threads, is_direct):
    if not is_direct:
        monkeypatch.setattr(slab_reader, "has_direct_reads", lambda path, buffer: False)
    m = machine(num_threads=num_threads)
    m.start(3, 0, 11)
    assert m.wait_for(3) == {3: None, 0: None, 11: None}
    assert [m.content(slot) for slot in range(3)] == [m.slab(3), m.slab(0), m.slab(11)]


def test_reads_that_cannot_be_queued_are_not_waited_for(machine, monkeypatch):
    m = machine()

    def refuse(*_, **__):
        raise MemoryError("no memory for the queue")

    with monkeypatch.context() as patch:
        patch.setattr(m.reader.reads, "submit", refuse)
        with pytest.raises(MemoryError):
            m.start(1, 2)
    assert not m.reader._loads
    m.start(2)
    assert m.wait_for(1) == {2: None}


@pytest.mark.parametrize("is_direct", [True, False])
def test_no_more_is_read_of_a_slab_than_its_layer_has(machine, monkeypatch, is_direct):
    if not is_direct:
        monkeypatch.setattr(slab_reader, "has_direct_reads", lambda path, buffer: False)
    m = machine(slab_bytes_of_layers=(3001, 5000, 4096))
    m.start(0, 3, 4, 11)
    assert m.wait_for(4) == {0: None, 3: None, 4: None, 11: None}
    filling = bytes(4096 - 3001), b"", bytes(5000 - 4096)
    for slot, (expert, filled) in enumerate([(0, 4096), (3, 4096), (4, 5000), (11, 5000)]):
        assert m.content(slot)[:filled] == m.slab(expert) + filling[expert // 4][: filled - len(m.slab(expert))]
    assert m.content(3) == m.slab(11) + filling[2]
    assert sum(span.label.num_bytes for span in m.spans()) == 4096 + 4096 + 8192 + 4096


@pytest.mark.parametrize(("num_urgent", "num_pieces"), [(1, 4), (2, 2), (3, 1)])
def test_few_urgent_reads_are_cut_into_pieces(machine, num_urgent, num_pieces):
    m = machine(num_threads=4, slab_bytes=4 * MIB + 1, num_layers=1)
    m.start(*range(num_urgent))
    m.wait_for(num_urgent)
    sizes = [span.label.num_bytes for span in m.spans()]
    assert len(sizes) == num_urgent * num_pieces
    assert sum(sizes) == num_urgent * m.spec.stride_bytes(0)
    assert not any(size % PAGE_BYTES for size in sizes)
    assert [m.content(slot) for slot in range(num_urgent)] == [m.slab(expert) for expert in range(num_urgent)]


def test_prefetches_are_read_whole_after_demand_and_by_layers(machine):
    m = machine(num_threads=0, slab_bytes=2 * MIB)
    m.start(9, 5, is_prefetch=True)
    m.start(4, is_prefetch=True, first_slot=2)
    m.start(8, 10, first_slot=3)
    m.wait_for(5)
    assert [expert for expert, _ in m.done] == [8, 10, 5, 4, 9]
    assert [(span.label.name, span.label.layer) for span in m.spans()] == [
        ("read", 2),
        ("read", 2),
        ("prefetch", 1),
        ("prefetch", 1),
        ("prefetch", 2),
    ]
    assert {span.label.num_bytes for span in m.spans()} == {2 * MIB}


def test_what_has_not_begun_can_be_cancelled_and_is_never_heard_of(machine):
    m = machine(num_threads=0)
    before = m.content(0)
    first, second = m.start(0, 1)
    assert first.cancel()
    assert not first.cancel()
    assert m.wait_for(1) == {1: None}
    assert not second.cancel()
    assert m.content(0) == before
    m.start(0)  # which it can be again
    assert m.wait_for(2) == {0: None, 1: None}


def test_a_read_that_fails_is_tried_again(machine, tmp_path):
    m = machine(num_threads=4, slab_bytes=4 * MIB, num_layers=1)
    cut = tmp_path / "cut"
    cut.write_bytes(m.slabs.index.path.read_bytes()[: m.spec.offset(1) + 3 * MIB])

    class Cut:
        """Reads by threads are cut, but a retry is not."""

        index, is_direct, read = m.slabs.index, False, staticmethod(m.slabs.read)
        descriptor = os.open(cut, os.O_RDONLY)

    m.reader.close()
    m.reader = DiskReader(Cut, m.arena, num_threads=4)
    m.start(1)
    assert m.wait_for(1) == {1: None}
    assert m.content(0) == m.slab(1)
    os.close(Cut.descriptor)


def test_a_damaged_slab_is_an_error_for_itself_only(machine):
    m = machine(num_threads=4)
    flip_bit(m.slabs.index.path, m.spec.offset(2) + 100)
    m.start(1, 2, 3)
    done = m.wait_for(3)
    assert isinstance(done[2], StorageError)
    assert "checksums differ" in str(done[2])
    assert (done[1], done[3]) == (None, None)


def test_a_slab_is_checked_once(machine):
    m = machine()
    m.start(2)
    m.wait_for(1)
    flip_bit(m.slabs.index.path, m.spec.offset(2) + 100)
    m.start(2)
    m.wait_for(2)
    assert [error for _, error in m.done] == [None, None]


def test_a_file_that_was_cut_is_an_error(machine):
    m = machine()
    m.start(2, 3, 4)  # whose checksums are known to be right from now on
    m.wait_for(3)
    os.truncate(m.slabs.index.path, m.spec.offset(3) + PAGE_BYTES)
    m.done.clear()
    m.start(2, 3, 4)
    done = m.wait_for(3)
    assert done[2] is None
    assert "it was cut" in str(done[3])
    assert "it was cut" in str(done[4])


def test_a_reader_that_closes_says_so_to_those_who_wait(machine):
    m = machine(num_threads=0)
    m.start(1, 2)
    m.start(5, is_prefetch=True, first_slot=2)
    m.reader.close()
    (load,) = m.start(3, first_slot=3)
    assert not load.cancel()
    assert [str(error) for error in m.wait_for(4).values()] == ["experts cannot be read: the engine is stopping"] * 4


def test_closing_lets_reads_end_that_have_begun(machine):
    for _ in range(20):
        m = machine(num_threads=4, slab_bytes=MIB, num_layers=1)
        m.start(*range(4))
        m.reader.close()
        for expert, error in m.wait_for(4).items():
            assert m.content(expert) == m.slab(expert) if error is None else "stopping" in str(error)


def test_a_cache_on_a_closed_reader_fails_instead_of_waiting(machine):
    m = machine()
    cache = make_cache(m)
    m.reader.close()
    with cache.acquire(0, [1, 2]) as lease, pytest.raises(StorageError, match="stopping"):
        lease.wait()
    assert cache.prefetch(0, [3]) == 1
    cache.drain()
    cache.check_integrity()
    assert cache.num_resident == 0


@given(content=st.binary(max_size=300))
def test_checksums_are_those_of_zlib(content):
    padded = np.frombuffer(content + b"\0", np.uint8)
    assert extension._cpu.crc32(padded.ctypes.data, len(content)) == zlib.crc32(content)


def make_cache(m):
    cache = ExpertCache(
        num_layers=m.spec.num_layers,
        num_experts=m.spec.num_experts,
        num_slots=m.arena.num_slots,
        slab_bytes=m.spec.slab_bytes,
        policy=LRU(m.spec.num_slabs),
        start_loads=m.reader.start_loads,
        wait=m.reader.wait,
    )
    m.reader.serve(cache)
    return cache


@pytest.mark.parametrize("damaged", [None, 6])
def test_passes_see_the_right_experts_whatever_is_prefetched(machine, damaged):
    m = machine(num_threads=3)
    cache = make_cache(m)
    if damaged is not None:
        flip_bit(m.slabs.index.path, m.spec.offset(damaged))
    chance = random.Random(1)
    num_failed = 0
    for step in range(150):
        layer = step % m.spec.num_layers
        experts = chance.sample(range(m.spec.num_experts), 2)
        with cache.acquire(layer, experts) as lease:
            cache.prefetch((layer + 1) % m.spec.num_layers, chance.sample(range(m.spec.num_experts), 2))
            try:
                lease.wait()
            except StorageError:
                assert damaged in [layer * m.spec.num_experts + expert for expert in experts]
                num_failed += 1
                continue
            for expert, slot in lease.slots.items():
                assert m.content(slot) == slab(m.spec, layer, expert)
    assert (num_failed > 0) == (damaged is not None)
    cache.drain()
    cache.check_integrity()


def test_the_probe_chooses_among_depths(machine, monkeypatch):
    monkeypatch.setattr("moeflow.experts.disk_reader._PROBE_S", 0.01)
    m = machine(num_slots=3)
    assert probe_read_depth(m.slabs, m.arena, m.arena.num_slots) in READ_DEPTHS


@pytest.mark.parametrize(
    ("rates", "best"), [((1, 1, 1), 8), ((1, 1.04, 1.04), 8), ((1, 1.2, 1), 4), ((1, 1.1, 1.3), 16)]
)
def test_more_or_fewer_threads_only_if_clearly_better(monkeypatch, rates, best):
    by_depth = dict(zip(READ_DEPTHS, rates, strict=True))
    monkeypatch.setattr("moeflow.experts.disk_reader._read_rate", lambda reader, arena, depth, *_: by_depth[depth])
    assert probe_read_depth(None, None, 1) == best
