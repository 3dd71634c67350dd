"""Weights outside of slabs, read into memory of our own and compared with their checksums."""

from __future__ import annotations

import os

import pytest

from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.layout import PIECE_BYTES
from moeflow.checkpoint.packed.reader import verify_packed_weights_file
from moeflow.checkpoint.packed.resident_reader import read_resident
from moeflow.core.errors import StorageError
from tests.checkpoint.packed.slabs import flip_bit, make_spec, resident, write_packed_weights_file

NUM_BYTES = 2 * PIECE_BYTES + 3 * PAGE_BYTES


@pytest.fixture
def index(tmp_path):
    return write_packed_weights_file(tmp_path / "model.slabs", make_spec(num_layers=1, resident_bytes=NUM_BYTES))


def test_they_are_what_was_written(index):
    memory = read_resident(index)
    assert memory.is_filled
    assert memory.block(NUM_BYTES).numpy().tobytes() == resident(index.spec)
    assert memory.experts(4, 5000) is None


def test_a_flipped_bit_is_found(index):
    flip_bit(index.path, index.spec.file_bytes - 1)
    with pytest.raises(StorageError, match="weights outside of experts, piece 2"):
        read_resident(index)


def test_a_file_that_was_cut_meanwhile_is_an_error(index):
    os.truncate(index.path, index.spec.file_bytes - PAGE_BYTES)
    with pytest.raises(StorageError, match="it was cut"):
        read_resident(index)


def test_a_whole_file_is_compared_with_its_checksums(index):
    seen = []
    verify_packed_weights_file(index, lambda *counts: seen.append(counts))
    assert len(seen) == index.spec.num_parts == 7
    assert seen[-1] == (index.spec.content_bytes, index.spec.content_bytes)
    flip_bit(index.path, index.spec.offset(3) + 4999)
    with pytest.raises(StorageError, match="layer 0, expert 3"):
        verify_packed_weights_file(index, lambda *_: None)
