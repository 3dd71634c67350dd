"""A mapped file: the bytes that were written, nothing of them changed, and errors instead of signals."""

from __future__ import annotations

import errno
import os

import pytest

import moeflow.checkpoint.packed.mapped as slab_map
from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.checkpoint.packed.mapped import map_weights
from moeflow.core.errors import CapacityError, CheckpointError
from moeflow.core.units import MIB
from tests.checkpoint.packed.slabs import make_spec, resident, slab, write_packed_weights_file


@pytest.fixture
def index(tmp_path):
    return write_packed_weights_file(tmp_path / "model.slabs", make_spec(resident_bytes=3 * PAGE_BYTES))


def test_weights_are_what_was_written(index):
    spec, memory, seen = index.spec, None, []
    memory = map_weights(index, lambda *counts: seen.append(counts))
    assert memory.is_filled
    assert memory.block(3 * PAGE_BYTES).numpy().tobytes() == resident(spec)
    for layer in range(spec.num_layers):
        num_bytes = spec.layer_bytes[layer]
        experts = memory.experts(spec.num_experts, num_bytes)
        for expert, row in enumerate(experts):
            assert row[:num_bytes].numpy().tobytes() == slab(spec, layer, expert)
    assert seen == [(spec.file_bytes, spec.file_bytes)]


def test_what_stays_on_disk_comes_when_it_is_read(index):
    spec, seen = index.spec, []
    left = range(spec.resident_start + PAGE_BYTES, spec.resident_start + 2 * PAGE_BYTES)
    memory = map_weights(index, lambda *counts: seen.append(counts), left_on_disk=left)
    assert seen[-1] == (spec.file_bytes - PAGE_BYTES,) * 2
    assert memory.block(3 * PAGE_BYTES).numpy().tobytes() == resident(spec)


def test_a_dense_model_has_no_experts_to_map(tmp_path):
    spec = make_spec(num_layers=0, num_experts=0, slab_bytes=0, resident_bytes=PAGE_BYTES)
    memory = map_weights(write_packed_weights_file(tmp_path / "model.slabs", spec))
    assert memory.block(PAGE_BYTES).numpy().tobytes() == resident(spec)


def test_the_file_is_never_written_to(index):
    before = index.path.read_bytes()
    map_weights(index).block(PAGE_BYTES)[:] = 7
    assert index.path.read_bytes() == before


def test_pages_become_large_and_hold_what_they_held(tmp_path):
    spec = make_spec(slab_bytes=MIB, resident_bytes=MIB)
    file = write_packed_weights_file(tmp_path / "model.slabs", spec).path
    file.write_bytes(file.read_bytes())  # copied just before, so that none of it is on disk yet
    memory = map_weights(read_slab_index(file), as_tensors=False)
    memory.pages.begin()
    memory.pages._thread.join()
    assert memory.block(MIB).tobytes() == resident(spec)
    for layer in range(spec.num_layers):
        for expert, row in enumerate(memory.experts(spec.num_experts, MIB)):
            assert row.tobytes() == slab(spec, layer, expert)


def test_a_file_that_was_cut_meanwhile_is_an_error(index):
    os.truncate(index.path, index.spec.file_bytes - PAGE_BYTES)
    with pytest.raises(CheckpointError, match="it was cut"):
        map_weights(index)


def test_a_file_that_went_away_is_an_error(index):
    index.path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        map_weights(index)


class Refusing:
    """A mapping whose pages cannot be brought in."""

    def __init__(self, error):
        self.error = error
        self.advice = []

    def __len__(self):
        return PAGE_BYTES

    def madvise(self, advice, *where):
        self.advice.append(advice)
        if advice == slab_map._POPULATE_READ:
            raise OSError(self.error, os.strerror(self.error))


def test_pages_that_cannot_be_read_are_an_error(index):
    with pytest.raises(CheckpointError, match=r"model\.slabs: cannot be read \(Bad address\).*Check the disk"):
        slab_map._bring_in(Refusing(errno.EFAULT), index, [range(PAGE_BYTES)], lambda *_: None)


def test_an_older_system_brings_pages_in_when_they_are_touched(index):
    content = Refusing(errno.EINVAL)
    slab_map._bring_in(content, index, [range(PAGE_BYTES)], lambda *_: None)
    assert len(content.advice) == 2


def test_addresses_that_are_refused_are_an_error(index, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(slab_map.mmap, "mmap", refuse)
    with pytest.raises(CapacityError, match=r"cannot be mapped.*ulimit -v"):
        map_weights(index)
