"""Cache, reader, real lane and real file together; and each way in which a read can end."""

from __future__ import annotations

import errno
import random
import threading

import pytest

import moeflow.checkpoint.packed.reader as slab_reader
from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.core.errors import StorageError
from moeflow.core.units import MIB
from moeflow.experts.cache.eviction import LRU
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.load_job import LoadJob
from moeflow.experts.disk_reader import READ_DEPTHS, DiskReader, probe_read_depth
from moeflow.experts.slot_arena import SlotArena
from moeflow.pipeline.runtime.lane import Lane
from tests.checkpoint.packed.slabs import flip_bit, make_spec, slab, write_packed_weights_file


class Machine:
    """A file of packed weights, slots, a lane, and a way to hold the lane back."""

    def __init__(self, folder, *, num_slots=6, num_threads=1, **spec):
        self.spec = make_spec(**spec)
        self.arena = SlotArena(num_slots, self.spec.slab_bytes)
        self.slabs = SlabReader(write_packed_weights_file(folder / "model.slabs", self.spec), self.arena.view(0))
        self.lane = Lane("disk", num_threads)
        self.submitted = []  # (is urgent, expert, bytes)
        self.reader = DiskReader(self.slabs, self.arena, self.submit, num_threads=num_threads)
        self.done = []  # (expert, error)
        self.bell = threading.Condition()

    def submit(self, work, is_urgent, expert, num_bytes):
        self.submitted.append((is_urgent, expert, num_bytes))
        return self.lane.submit(work, priority=0 if is_urgent else 1)

    def hold(self):
        """Keep a lane of one thread busy until the returned event is set."""
        held, gate = threading.Event(), threading.Event()
        self.lane.submit(lambda: (held.set(), gate.wait()))
        held.wait()
        return gate

    def start(self, *experts, is_prefetch=False):
        jobs = [LoadJob(expert, slot, is_prefetch=is_prefetch) for slot, expert in enumerate(experts)]
        return self.reader.start_loads(jobs, self.on_done)

    def on_done(self, job, error):
        with self.bell:
            self.done.append((job.expert, error))
            self.bell.notify_all()

    def wait_for(self, count):
        with self.bell:
            assert self.bell.wait_for(lambda: len(self.done) >= count, timeout=10)
        return dict(self.done)

    def content(self, slot):
        return bytes(self.arena.view(slot)[: self.spec.slab_bytes])

    def slab(self, expert):
        return slab(self.spec, *divmod(expert, self.spec.num_experts))


@pytest.fixture
def machine(tmp_path):
    made = []

    def make(**options):
        made.append(Machine(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.lane.close()
        one.slabs.close()


def test_slabs_land_in_their_slots(machine):
    m = machine(num_threads=4)
    m.start(3, 0, 11)
    assert m.wait_for(3) == {3: None, 0: None, 11: None}
    assert [m.content(slot) for slot in range(3)] == [m.slab(3), m.slab(0), m.slab(11)]


@pytest.mark.parametrize(("num_urgent", "num_pieces"), [(1, 4), (2, 2), (3, 1)])
def test_few_urgent_reads_are_cut_into_pieces(machine, num_urgent, num_pieces):
    m = machine(num_threads=4, slab_bytes=4 * MIB + 1, num_layers=1)
    m.start(*range(num_urgent))
    m.wait_for(num_urgent)
    assert len(m.submitted) == num_urgent * num_pieces
    assert [m.content(slot) for slot in range(num_urgent)] == [m.slab(expert) for expert in range(num_urgent)]


def test_prefetches_are_read_whole_and_after_demand(machine):
    m = machine(slab_bytes=2 * MIB, num_layers=1)
    gate = m.hold()
    m.start(0, 1, is_prefetch=True)
    m.start(2)
    gate.set()
    m.wait_for(3)
    assert [expert for expert, _ in m.done] == [2, 0, 1]
    assert m.submitted == [(False, 0, 2 * MIB), (False, 1, 2 * MIB), (True, 2, 2 * MIB)]


def test_what_has_not_begun_can_be_cancelled_and_is_never_heard_of(machine):
    m = machine()
    before = m.content(0)
    gate = m.hold()
    first, second = m.start(0, 1)
    assert not first.has_begun
    assert first.cancel()
    gate.set()
    assert m.wait_for(1) == {1: None}
    assert second.has_begun
    assert not second.cancel()
    assert m.content(0) == before


def test_a_broken_piece_is_read_again(machine, monkeypatch):
    m = machine(num_threads=4, slab_bytes=4 * MIB, num_layers=1)
    faults = [OSError(errno.EIO, "Input/output error")]
    read_all = slab_reader.read_all

    def read_or_fail(descriptor, into, start):
        if faults:
            raise faults.pop()
        return read_all(descriptor, into, start)

    monkeypatch.setattr(slab_reader, "read_all", read_or_fail)
    m.start(1)
    assert m.wait_for(1) == {1: None}
    assert m.content(0) == m.slab(1)


def test_a_damaged_slab_is_an_error_for_itself_only(machine):
    m = machine(num_threads=4)
    flip_bit(m.slabs.index.path, m.spec.offset(2) + 100)
    m.start(1, 2, 3)
    done = m.wait_for(3)
    assert isinstance(done[2], StorageError)
    assert (done[1], done[3]) == (None, None)


def test_a_lane_that_closes_says_so_to_those_who_wait(machine):
    m = machine()
    gate = m.hold()
    m.start(1, 2)
    threading.Timer(0.02, gate.set).start()
    m.lane.close()
    m.start(3)
    assert [str(error) for error in m.wait_for(3).values()] == [
        "experts are not read any more: the engine is stopping"
    ] * 3


def test_a_cache_on_a_closed_lane_fails_instead_of_waiting(machine):
    m = machine()
    cache = make_cache(m)
    m.lane.close()
    with cache.acquire(0, [1, 2]) as lease, pytest.raises(StorageError, match="stopping"):
        lease.wait()
    assert cache.prefetch(0, [3]) == 1
    cache.drain()
    cache.check_integrity()
    assert cache.num_resident == 0


def make_cache(m):
    return ExpertCache(
        num_layers=m.spec.num_layers,
        num_experts=m.spec.num_experts,
        num_slots=m.arena.num_slots,
        slab_bytes=m.spec.slab_bytes,
        policy=LRU(m.spec.num_slabs),
        start_loads=m.reader.start_loads,
    )


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
