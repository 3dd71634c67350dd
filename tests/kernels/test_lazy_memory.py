"""Memory that is only taken once it is used."""

import errno
import mmap
import platform
import re
from pathlib import Path

import numpy as np
import psutil
import pytest

from moeflow.kernels import lazy_memory
from moeflow.kernels.lazy_memory import ALIGNMENT, LazyMemory, allocate_lazily

MIB = 2**20


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 2 * MIB, 5 * MIB + 1])
def test_it_is_zeroed_and_aligned(num_bytes):
    memory = allocate_lazily(num_bytes)
    assert memory.shape == (num_bytes,)
    assert num_bytes == 0 or memory.data_ptr() % ALIGNMENT == 0
    assert not memory.any()
    memory.fill_(1)
    assert memory.all()


def test_what_is_not_touched_takes_no_room():
    process = psutil.Process()
    before = process.memory_info().rss
    memory = allocate_lazily(2**31)
    memory[2**30] = 1
    assert process.memory_info().rss - before < 64 * MIB


@pytest.mark.parametrize("num_bytes", [2**50, 2**63])
def test_what_cannot_be_had_is_a_memory_error(num_bytes):
    with pytest.raises(MemoryError, match=f"{num_bytes} bytes"):
        allocate_lazily(num_bytes)


@pytest.mark.parametrize("huge_pages", [True, False])
def test_only_what_is_touched_is_taken_and_what_is_given_back_is_free(huge_pages):
    process = psutil.Process()
    memory = LazyMemory(64 * MIB + 5000, huge_pages=huge_pages)
    before = process.memory_info().rss
    memory.tensor.fill_(1)
    assert 64 * MIB <= process.memory_info().rss - before < 65 * MIB
    memory.give_back(100, 60 * MIB + 1)
    assert process.memory_info().rss - before < 6 * MIB
    assert memory.tensor[:100].all()
    assert memory.tensor[60 * MIB :].all()
    assert not memory.tensor[4096 : 60 * MIB].any()


def test_small_memory_stays():
    memory = LazyMemory(MIB)
    memory.tensor.fill_(1)
    memory.give_back(0, MIB)
    assert memory.tensor.all()


def _has_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not _has_huge_pages(), reason="this system has no huge pages, or none for us")
def test_pages_are_small_until_they_are_enlarged_and_what_is_in_them_stays():
    process = psutil.Process()
    memory = LazyMemory(64 * MIB + 5000, huge_pages=False)
    before = process.memory_info().rss
    places = range(0, 64 * MIB + 5000, 4 * MIB)
    for place in places:
        memory.bytes[place] = place // MIB + 1
    assert process.memory_info().rss - before < 2 * MIB
    memory.enlarge_pages(range(place, place + 1) for place in places)
    taken = process.memory_info().rss - before
    assert taken >= 16 * 2 * MIB or not _can_collapse()
    assert taken < 36 * MIB  # and nothing besides
    memory.bytes[2 * MIB] = 1
    assert process.memory_info().rss - before - taken >= 2 * MIB
    memory.bytes[2 * MIB] = 0
    assert np.flatnonzero(memory.bytes).tolist() == list(places)
    assert memory.bytes[places].tolist() == [place // MIB + 1 for place in places]


def _can_collapse():
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 1)


def test_small_memory_has_no_pages_to_enlarge():
    memory = LazyMemory(MIB)
    memory.enlarge_pages([range(MIB)])
    assert not memory.bytes.any()


class WithoutHugePages(mmap.mmap):
    """A mapping of a system that was built without them."""

    def madvise(self, advice, *where):
        if advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE):
            raise OSError(errno.EINVAL, "Invalid argument")
        super().madvise(advice, *where)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system knows no such advice")
def test_a_system_without_huge_pages_takes_small_ones(monkeypatch):
    monkeypatch.setattr(lazy_memory.mmap, "mmap", WithoutHugePages)
    memory = LazyMemory(5 * MIB)
    memory.tensor.fill_(1)
    memory.enlarge_pages([range(5 * MIB)])
    assert memory.tensor.all()
    memory.give_back(0, 5 * MIB)
    assert not memory.tensor[: 4 * MIB].any()
