"""Pages of a mapped file, on the system as it is: /proc/self/smaps reports large pages."""

from __future__ import annotations

import mmap
import os
import random
import re
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from moeflow.kernels.arrays import address
from moeflow.kernels.mapped_pages import LARGE_PAGE_BYTES, MappedPages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say how pages lie")
NUM_PAGES = 4
NUM_BYTES = NUM_PAGES * LARGE_PAGE_BYTES + 5000


def bytes_on_large_pages(array) -> int:
    """What the system says of the mapping that an array begins."""
    is_ours, found = False, 0
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                is_ours = address(array) <= int(match[1], 16) < address(array) + array.nbytes
            elif is_ours and line.startswith("FilePmdMapped:"):
                found += int(line.split()[1]) * 1024
    return found


@contextmanager
def mapped(file, *, brought_in=range(NUM_BYTES)):
    """Yield pages of a mapping, the mapping and what the file holds."""
    content = random.Random(3).randbytes(NUM_BYTES)
    with file.open("wb", buffering=0) as stream:
        for start in range(0, NUM_BYTES, 12288):  # as files are copied: small pages in the cache
            stream.write(content[start : start + 12288])
    descriptor = os.open(file, os.O_RDONLY)
    try:
        mapping = mmap.mmap(descriptor, NUM_BYTES, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(mapping, np.uint8)
        array[brought_in.start : brought_in.stop : 4096].sum()
        pages = MappedPages(array, [brought_in], descriptor)
        if not pages.can_tell:
            pytest.skip("this system does not say how pages lie (Linux 6.7 does)")
        if address(array) % LARGE_PAGE_BYTES:
            pytest.skip("this file system maps files where large pages cannot be")
        yield pages, array, content
    finally:
        os.close(descriptor)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "weights"


def large_again(pages, start):
    """Read a page's place again, and return whether it is a large one now."""
    pages.settle()
    pages.read_again(start)
    return not pages.is_small(start)


def test_small_pages_are_read_again_as_large_ones_of_the_same_bytes(file):
    with mapped(file) as (pages, array, content):
        small = pages.small()
        assert pages.large_bytes() == bytes_on_large_pages(array) == (NUM_PAGES - len(small)) * LARGE_PAGE_BYTES
        if not small or not large_again(pages, small[0]):
            pytest.skip("this file system has no large pages in its cache, or no small ones")
        for start in small[1:]:
            assert large_again(pages, start)
        assert pages.small() == []
        assert pages.large_bytes() == bytes_on_large_pages(array) == NUM_PAGES * LARGE_PAGE_BYTES
        assert array.tobytes() == content


def test_what_was_written_to_or_never_brought_in_is_not_counted_as_small(file):
    brought_in = range(2 * LARGE_PAGE_BYTES)
    with mapped(file, brought_in=brought_in) as (pages, array, _):
        if pages.small() != [0, LARGE_PAGE_BYTES]:
            pytest.skip("this file system has large pages at once, or brings in more")
        array.flags.writeable = True
        array[5] = 7
        assert pages.small() == [LARGE_PAGE_BYTES]
        assert not pages.is_small(0)
        assert pages.is_small(LARGE_PAGE_BYTES)


def test_older_systems_are_offered_all_that_was_brought_in(file, monkeypatch):
    brought_in = range(4096, 3 * LARGE_PAGE_BYTES)
    with mapped(file, brought_in=brought_in) as (pages, _, __):
        monkeypatch.setattr("moeflow.kernels.mapped_pages._PAGEMAP_SCAN", 0xC0606611)  # no such call
        assert not pages._has_scan()
        pages.can_tell = False
        assert pages.small() == [LARGE_PAGE_BYTES, 2 * LARGE_PAGE_BYTES]


def test_more_regions_than_one_call_returns(file, monkeypatch):
    with mapped(file) as (pages, array, _):
        if len(pages.small()) != NUM_PAGES:
            pytest.skip("this file system has large pages at once")
        array.flags.writeable = True
        array[LARGE_PAGE_BYTES] = array[3 * LARGE_PAGE_BYTES - 1] = 7
        monkeypatch.setattr("moeflow.kernels.mapped_pages._MAX_REGIONS", 1)
        assert pages.small() == [0, 3 * LARGE_PAGE_BYTES]


def test_an_advice_that_is_refused_is_an_error(file):
    with mapped(file) as (pages, _, __), pytest.raises(OSError, match=r"\[Errno"):
        pages.collapse(4096 + 1)  # no page begins there
