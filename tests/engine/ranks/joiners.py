"""`moeflow join` as processes of a test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PATIENCE_S = 90.0


class Joiner:
    """One process, and its output."""

    def __init__(self, address: str, cache_dir: Path, prefix: Sequence[str] = ()) -> None:
        """Start it, behind the words of another command if there is a prefix."""
        self._log = cache_dir / f"join-{time.monotonic_ns()}.log"
        verb = (sys.executable, "-m", "moeflow.cli.main", "join")
        command = [*prefix, *verb, address, "--threads", "1", "--cache-dir", str(cache_dir)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def said(self) -> str:
        return self._log.read_text()

    def expect(self, text: str, times: int = 1) -> None:
        """Wait until it has said this so many times."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.said().count(text) < times:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(0.02)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def joined(address: str, cache_dir: Path, number: int = 1, prefix: Sequence[str] = ()) -> Iterator[list[Joiner]]:
    joiners = [Joiner(address, cache_dir, prefix) for _ in range(number)]
    try:
        yield joiners
    finally:
        for joiner in joiners:
            joiner.end()
