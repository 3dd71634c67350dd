"""The thread that puts mapped weights on large pages: its requests to each system, and when it stops."""

from __future__ import annotations

import errno
import logging
import os
import threading

import pytest

from moeflow.checkpoint.packed import large_pages
from moeflow.checkpoint.packed.large_pages import LargePages
from moeflow.kernels.mapped_pages import LARGE_PAGE_BYTES

NUM_PAGES = 40
SMALL = [number * LARGE_PAGE_BYTES for number in range(NUM_PAGES)]


class FakePages:
    """Pages of a system that merges them, or returns errors, or can read them again into large ones."""

    def __init__(self, collapse_errors=(), *, can_tell=True, reads_large=True):
        self.can_tell = can_tell
        self.collapse_errors = iter(collapse_errors)
        self.reads_large = reads_large
        self.large = set()
        self.asked = []

    def small(self):
        return [start for start in SMALL if start not in self.large]

    def is_small(self, start):
        return start not in self.large

    def large_bytes(self):
        return len(self.large) * LARGE_PAGE_BYTES

    def settle(self):
        self.asked.append("settle")

    def collapse(self, start):
        self.asked.append(("collapse", start))
        number = next(self.collapse_errors, None)
        if number is not None:
            raise OSError(number, os.strerror(number))
        self.large.add(start)

    def read_again(self, start):
        self.asked.append(("read", start))
        if self.reads_large:
            self.large.add(start)

    def count(self, what):
        return sum(each[0] == what for each in self.asked if each != "settle")


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "model.slabs"
    file.write_bytes(b"weights")
    return file


def enlarge(file, pages, *, identity=None):
    """Have the thread do all it does."""
    thread = LargePages(file, identity or file.stat(), lambda _: pages)
    thread.begin()
    thread._thread.join()
    return thread


def every(number):
    while True:
        yield number


def test_pages_are_copied_together_once_the_file_is_on_disk(file):
    pages = FakePages()
    enlarge(file, pages)
    assert pages.asked == ["settle", *(("collapse", start) for start in SMALL)]


def test_nothing_is_asked_of_pages_that_are_large(file, caplog):
    pages = FakePages()
    pages.large.update(SMALL)
    with caplog.at_level(logging.INFO):
        enlarge(file, pages)
    assert pages.asked == []
    assert "80.0 MiB of 7 B lie on pages of 2 MiB, 0 B of these since the start" in caplog.text


def test_a_system_that_cannot_reads_them_again_and_is_asked_once(file, caplog):
    pages = FakePages(every(errno.EINVAL))
    with caplog.at_level(logging.INFO):
        enlarge(file, pages)
    assert pages.asked == ["settle", ("collapse", SMALL[0]), *(("read", start) for start in SMALL)]
    assert "80.0 MiB of these since the start" in caplog.text


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EBUSY])
def test_a_page_that_cannot_become_large_just_now_stays_and_is_not_read(file, number):
    pages = FakePages([None, number, number])
    enlarge(file, pages)
    assert pages.count("collapse") == NUM_PAGES
    assert pages.count("read") == 0
    assert pages.small() == SMALL[1:3]


def test_memory_in_small_pieces_ends_the_attempt(file):
    pages = FakePages([None] * 3 + [errno.ENOMEM] * NUM_PAGES)
    enlarge(file, pages)
    assert pages.count("collapse") == 3 + large_pages._PATIENCE


def test_reading_again_ends_where_it_brings_no_large_pages(file):
    pages = FakePages(every(errno.EINVAL), reads_large=False)
    enlarge(file, pages)
    assert pages.count("read") == large_pages._PATIENCE


def test_nothing_is_read_where_nobody_can_tell_whether_it_helps(file):
    pages = FakePages(every(errno.EINVAL), can_tell=False)
    enlarge(file, pages)
    assert pages.count("read") == 0


def test_a_page_that_is_no_longer_the_files_alone_is_not_dropped(file):
    pages = FakePages(every(errno.EINVAL))
    written = SMALL[2]
    pages.is_small = lambda start: start != written and start not in pages.large
    enlarge(file, pages)
    assert pages.asked == ["settle", ("collapse", 0), *(("read", start) for start in SMALL if start != written)]


def test_another_file_in_its_place_is_left_alone(file, tmp_path):
    identity = file.stat()
    other = tmp_path / "other"
    other.write_bytes(b"others")
    other.rename(file)
    pages = FakePages()
    enlarge(file, pages, identity=identity)
    assert pages.asked == []


def test_a_file_that_has_gone_is_no_error(file):
    identity = file.stat()
    file.unlink()
    pages = FakePages()
    enlarge(file, pages, identity=identity)
    assert pages.asked == []


@pytest.mark.parametrize("what", ["settle", "read_again"])
def test_a_disk_that_fails_is_a_line_in_the_log(file, caplog, what):
    pages = FakePages(every(errno.EINVAL))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    setattr(pages, what, fail)
    enlarge(file, pages)
    assert "its pages stay as they are (Input/output error)" in caplog.text
    assert pages.count("read") == 0


def test_it_ends_after_the_page_that_it_is_at(file):
    pages = FakePages()
    thread = LargePages(file, file.stat(), lambda _: pages)
    is_at_a_page, may_go_on = threading.Event(), threading.Event()
    collapse = pages.collapse

    def slowly(start):
        is_at_a_page.set()
        may_go_on.wait()
        collapse(start)

    pages.collapse = slowly
    thread.begin()
    is_at_a_page.wait()
    thread._has_to_end.set()  # as `close` begins
    may_go_on.set()
    thread.close()
    assert pages.asked == ["settle", ("collapse", 0)]
    assert not thread._thread.is_alive()


def test_one_that_never_began_can_be_closed(file):
    LargePages(file, file.stat(), lambda _: FakePages()).close()
