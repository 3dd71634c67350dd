"""Puts mapped weights on large pages, in a thread, while the model already computes from them.

A file read from disk after `MADV_HUGEPAGE` lies on large pages. A file copied or downloaded just before, or read in
small pieces, lies on small ones, which slow down decoding of one request. The system merges these where it can
(`MADV_COLLAPSE`). Elsewhere they are dropped and read again, one large page at a
time: a pass that needs it waits for that one read, and memory holds no more than before. Parts that were not loaded
stay out. Both methods stop early if they bring nothing: on file systems without large pages, with mappings of other
processes, or with fragmented memory.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from moeflow.core.units import format_bytes
from moeflow.kernels.mapped_pages import LARGE_PAGE_BYTES, MappedPages

logger = logging.getLogger(__name__)

_PATIENCE: Final = 16  # large pages in a row that did not come about before no more are tried
_END_TIMEOUT_S: Final = 10.0  # for a disk that does not answer; then the thread ends with the process


class LargePages:
    """The thread, for one mapped file."""

    def __init__(self, file: Path, identity: os.stat_result, pages_of: Callable[[int], MappedPages]) -> None:
        """Take the file and its identity at the time of mapping; `pages_of` a descriptor of it are looked at."""
        self._file = file
        self._identity = identity
        self._pages_of = pages_of
        self._has_to_end = threading.Event()
        self._can_collapse = True  # as far as is known
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start it; it ends by itself."""
        self._thread = threading.Thread(target=self._run, name="large pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, after the large page that it is at."""
        self._has_to_end.set()
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT_S)

    def _run(self) -> None:
        try:
            descriptor = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it was deleted; its pages go with the last mapping
            return
        try:
            if os.path.samestat(os.fstat(descriptor), self._identity):  # not another that took its place
                self._enlarge(self._pages_of(descriptor))
        except OSError as error:
            logger.warning("%s: its pages stay as they are (%s)", self._file, error.strerror)
        finally:
            os.close(descriptor)

    def _enlarge(self, pages: MappedPages) -> None:
        small = pages.small()
        if small:
            pages.settle()  # unwritten pages can be neither dropped nor merged
        num_failed = num_enlarged = 0
        for start in small:
            if self._has_to_end.is_set() or num_failed == _PATIENCE:
                break
            is_large = self._enlarge_page(pages, start)
            num_enlarged += is_large
            num_failed = 0 if is_large else num_failed + 1
        if pages.can_tell:
            enlarged = format_bytes(num_enlarged * LARGE_PAGE_BYTES)
            logger.info(
                "%s: %s of %s lie on pages of 2 MiB, %s of these since the start",
                self._file.name,
                format_bytes(pages.large_bytes()),
                format_bytes(self._identity.st_size),
                enlarged,
            )

    def _enlarge_page(self, pages: MappedPages, start: int) -> bool:
        """Return whether that made a large page."""
        if self._can_collapse:
            try:
                pages.collapse(start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return False  # memory is in small pieces just now, or somebody holds a page
                self._can_collapse = False
            else:
                return True
        if not pages.can_tell or not pages.is_small(start):
            return False
        pages.read_again(start)
        return not pages.is_small(start)
