"""`moeflow join` as processes of a test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = 90.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Joiner:
    """One process, and what it has said."""

    def __init__(self, port: int, cache_dir: Path, *options: str) -> None:
        self._log = cache_dir / f"join-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "moeflow.cli.main", "join", f"127.0.0.1:{port}", "--threads", "1", *options]
        with self._log.open("w") as log:
            self.process = subprocess.Popen([*command, "--cache-dir", str(cache_dir)], stderr=log)

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
def joined(port: int, cache_dir: Path, number: int = 1) -> Iterator[list[Joiner]]:
    joiners = [Joiner(port, cache_dir) for _ in range(number)]
    try:
        yield joiners
    finally:
        for joiner in joiners:
            joiner.end()
