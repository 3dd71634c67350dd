"""Runs a module in a process of its own, so that its imports and buffers take no memory afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress


def run_apart(module: str, order: bytes, *, timeout_s: float | None = None) -> Iterator[bytes]:
    """Run a module with an order on its stdin; yield the lines of its stdout. It ends when they are no longer read.

    Ctrl-C reaches this process alone. Raises: OSError if the process cannot be started; ChildProcessError, which is
    one, if it fails; TimeoutError, which is another, if it takes longer than `timeout_s`.
    """
    command = [sys.executable, "-m", module]
    pipe = subprocess.PIPE
    is_late = threading.Event()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(threading.TIMEOUT_MAX if timeout_s is None else timeout_s, end)
        timer.daemon = True
        try:
            timer.start()
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(order)
            yield from process.stdout
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if is_late.is_set():
        raise TimeoutError(f"its process took longer than {timeout_s:g} seconds")
    if code:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise ChildProcessError(f"its process ended {how}")
