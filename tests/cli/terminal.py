"""A command in a pseudo-terminal: what a person would see, and the keys that a person would press."""

from __future__ import annotations

import codecs
import os
import pty
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 120.0


class Terminal:
    """A running command's terminal, read up to the next expected text."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unread = ""

    def expect(self, text: str) -> str:
        """Return what came up to and with `text`; an empty text stands for anything that has not been seen yet."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._unread or not self._unread:
            assert time.monotonic() < deadline, self._unread
            self._unread += self._read()
        before, _, self._unread = self._unread.partition(text) if text else (self._unread, "", "")
        return before + text

    def rest(self) -> str:
        """Return what came until the command ended."""
        while True:
            try:
                self._unread += self._read()
            except OSError:  # Linux's error when the writer is gone
                return self._unread

    def _read(self) -> str:
        return self._decoder.decode(os.read(self._descriptor, 4096))

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)


@contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    """Run a command with a terminal of its own, so that keys like Ctrl-C reach it; it does not outlive the block."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=_own_terminal
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _own_terminal() -> None:
    """Make stdin the terminal that Ctrl-C is pressed in."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
