"""Ends a keeper once the process that has started it is gone: at once, or after its engine.

The parent may end on request, and then the engine ends as well. Or its own parent failed, which need not affect the
engine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


class OrphanWatch:
    """Watches a pipe whose other end the process holds that has started this one."""

    def __init__(self, pipe: IO[bytes]) -> None:
        """Begin; no other code may read from the pipe."""
        self._pipe = pipe
        self._lock = threading.Lock()
        self._is_computing = self._is_orphan = False
        threading.Thread(target=self._watch, name="orphan watch", daemon=True).start()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Ignore the end of the parent inside the block."""
        with self._lock:
            self._is_computing = True
        try:
            yield
        finally:
            with self._lock:
                self._is_computing = False
                self._end_if_needless()

    def _watch(self) -> None:
        self._pipe.read()  # until its other end is closed
        with self._lock:
            self._is_orphan = True
            self._end_if_needless()

    def _end_if_needless(self) -> None:
        if self._is_orphan and not self._is_computing:
            os._exit(0)  # whatever the other threads do: they wait for an engine that is not to have this rank
