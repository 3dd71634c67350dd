"""Files read and written piece by piece, as a system may do it that takes or gives less than was asked for."""

from __future__ import annotations

import os

import pytest

from moeflow.checkpoint.packed import file_io
from moeflow.checkpoint.packed.file_io import PAGE_BYTES, read_all, reserve, write_all
from moeflow.checkpoint.packed.layout import decode_header
from moeflow.core.errors import CheckpointError


@pytest.fixture
def descriptor(tmp_path):
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_what_is_reserved_takes_room_on_the_disk(descriptor):
    reserve(descriptor, 10 * PAGE_BYTES)
    found = os.fstat(descriptor)
    assert found.st_size == 10 * PAGE_BYTES
    assert found.st_blocks * 512 >= 10 * PAGE_BYTES  # not a hole that a full disk could not fill


def test_all_is_written_though_the_system_takes_little_at_a_time(descriptor, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(file_io.os, "pwrite", lambda where, view, start: pwrite(where, view[:7], start))
    write_all(descriptor, memoryview(bytes(range(200))), 50)
    assert os.pread(descriptor, 1000, 0) == bytes(50) + bytes(range(200))


def test_reading_goes_on_from_whole_pages_and_ends_with_the_file(descriptor, monkeypatch):
    content = os.urandom(3 * PAGE_BYTES + 100)
    write_all(descriptor, memoryview(content), 0)
    preadv, sizes = os.preadv, []

    def at_most_a_page(where, buffers, start):
        sizes.append(len(buffers[0]))
        return preadv(where, [buffers[0][:PAGE_BYTES]], start)

    monkeypatch.setattr(file_io.os, "preadv", at_most_a_page)
    into = bytearray(5 * PAGE_BYTES)
    assert read_all(descriptor, memoryview(into), PAGE_BYTES) == 2 * PAGE_BYTES + 100
    assert into == content[PAGE_BYTES:] + bytes(len(into) - 2 * PAGE_BYTES - 100)
    assert sizes == [5 * PAGE_BYTES, 4 * PAGE_BYTES, 3 * PAGE_BYTES]
    assert read_all(descriptor, memoryview(bytearray(PAGE_BYTES)), 0) == PAGE_BYTES
    assert read_all(descriptor, memoryview(bytearray(10)), 10**6) == 0


@pytest.mark.parametrize("page", [b"", b"MOESLAB\n", b"MOESLAB\n" + bytes(PAGE_BYTES - 9), b"other".ljust(PAGE_BYTES)])
def test_a_file_cut_within_its_first_page_is_no_packed_weights_file(page, tmp_path):
    with pytest.raises(CheckpointError, match="is no file of packed weights"):
        decode_header(page, tmp_path)
