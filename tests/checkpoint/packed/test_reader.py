"""Reads that fail, are short or bring something else: tried again, then an error that names file and slab."""

from __future__ import annotations

import errno
import itertools

import pytest

import moeflow.checkpoint.packed.reader as slab_reader
from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.layout import SlabIndex
from moeflow.checkpoint.packed.reader import SlabReader
from moeflow.core.errors import CheckpointError, StorageError
from moeflow.experts.slot_arena import SlotArena
from tests.checkpoint.packed.slabs import flip_bit, make_spec, slab, write_packed_weights_file


@pytest.fixture(params=["direct", "buffered"])
def reader(tmp_path, request, monkeypatch):
    if request.param == "buffered":
        monkeypatch.setattr(slab_reader, "has_direct_reads", lambda path, buffer: False)
    arena = SlotArena(2, 5000)
    reader = SlabReader(write_packed_weights_file(tmp_path / "model.slabs", make_spec()), arena.view(0))
    if request.param == "direct" and not reader.is_direct:
        pytest.skip("the file system of the tests reads through the page cache only")
    yield reader
    reader.close()
    reader.close()


@pytest.fixture
def slot():
    return SlotArena(1, 5000).view(0)


def fail_first(monkeypatch, count, fault):
    """Let the first reads end as `fault(number of bytes read)` says; return how many reads there were."""
    reads = itertools.count(1)
    seen = []
    read_all = slab_reader.read_all

    def read_or_fail(descriptor, into, start):
        seen.append(start)
        done = read_all(descriptor, into, start)
        return fault(into, done) if next(reads) <= count else done

    monkeypatch.setattr(slab_reader, "read_all", read_or_fail)
    return seen


def broken(into, done):
    raise OSError(errno.EIO, "Input/output error")


def short(into, done):
    return done - PAGE_BYTES


def changed(into, done):
    into[77] ^= 1
    return done


def test_every_slab_is_read_right(reader, slot):
    spec = reader.index.spec
    for layer, expert in itertools.product(range(spec.num_layers), range(spec.num_experts)):
        reader.read(spec.number(layer, expert), slot)
        assert slot[: spec.layer_bytes[layer]] == slab(spec, layer, expert)


@pytest.mark.parametrize("fault", [broken, short, changed])
def test_a_passing_fault_does_no_harm(reader, slot, monkeypatch, fault):
    seen = fail_first(monkeypatch, 2, fault)
    reader.read(5, slot)
    assert slot[:5000] == slab(reader.index.spec, 1, 1)
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("fault", "reason"), [(broken, "Input/output error"), (short, "the file ends at"), (changed, "checksums differ")]
)
def test_a_lasting_fault_names_the_slab(reader, slot, monkeypatch, fault, reason):
    fail_first(monkeypatch, 99, fault)
    with pytest.raises(StorageError, match=rf"model\.slabs, layer 1, expert 1: .*{reason}.* Check the disk"):
        reader.read(5, slot)


def test_a_flipped_bit_on_disk_is_found_and_concerns_one_slab_only(reader, slot):
    flip_bit(reader.index.path, reader.index.spec.offset(5) + 4999)
    with pytest.raises(StorageError, match="layer 1, expert 1"):
        reader.read(5, slot)
    reader.read(4, slot)
    assert slot[:5000] == slab(reader.index.spec, 1, 0)


def test_a_file_that_is_cut_while_in_use_is_an_error(reader, slot):
    with reader.index.path.open("r+b") as stream:
        stream.truncate(reader.index.spec.offset(11))
    with pytest.raises(StorageError, match=r"layer 2, expert 3: .*it was cut"):
        reader.read(11, slot)
    reader.read(10, slot)


def test_a_slab_is_checked_once(reader, slot, monkeypatch):
    checks = []
    monkeypatch.setattr(slab_reader, "checksum", lambda content: checks.append(1) or reader.index.checksums[3])
    for _ in range(3):
        reader.read(3, slot)
    assert len(checks) == 1


def test_a_file_that_went_away_cannot_be_opened(tmp_path, slot):
    with pytest.raises(CheckpointError, match=r"gone: cannot be opened"):
        SlabReader(SlabIndex(tmp_path / "gone", make_spec(), ()), slot)
