"""Work that may take too long or too much memory, in processes that may be killed. See `worker_limits` for the limits.

As many processes as were ever busy at once are kept ready, so that a normal call costs two messages over a socket.
It does not interpret the messages.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moeflow.text.template_messages import receive

WAIT_S = 30.0  # for a process that gets no processor time; one that does is ended by its own limit
Failure = Callable[[str], Exception]  # of a reason, worded as "it ..." about the task


class LimitedProcesses:
    """Processes that run a module; each gets the same first message. Any thread may call."""

    def __init__(self, module: str, opening: bytes, failure: Failure) -> None:
        self._module, self._opening, self._failure = module, opening, failure
        self._idle: list[_LimitedProcess] = []
        self._finalizer = weakref.finalize(self, _end_all, self._idle)

    def warm_up(self) -> None:
        """Start a process, so that the first to ask need not wait for it."""
        process = self._start()
        self._idle.append(process)
        process.send_opening()

    @contextmanager
    def one(self) -> Iterator[_LimitedProcess]:
        """Lend a process; it is killed if the block raises, or marks it as done."""
        process = self._take()
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        if process.is_done:
            process.kill()
        else:
            self._idle.append(process)

    def close(self) -> None:
        """End all processes that are idle; later calls start new ones."""
        _end_all(self._idle)

    def _take(self) -> _LimitedProcess:
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return self._start()
            if process.is_alive:
                return process
            process.kill()

    def _start(self) -> _LimitedProcess:
        return _LimitedProcess(self._module, self._opening, self._failure)


class _LimitedProcess:
    """One process and the socket to it."""

    def __init__(self, module: str, opening: bytes, failure: Failure) -> None:
        self._failure = failure
        self.is_done = False  # is not to be asked again
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                # A session of its own: Ctrl-C in the terminal must not reach it.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            self._connection.close()
            raise failure(f"needs a process, and none can be started: {error}") from None
        self._opening = opening
        self._is_open = False

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def send_opening(self) -> None:
        """Send the first message, unless that was done before. Raises: OSError."""
        self._connection.settimeout(WAIT_S)
        if not self._is_open:
            self._is_open = True
            self._connection.sendall(self._opening)

    def ask(self, request: bytes, max_reply_bytes: int) -> bytes:
        """Send a request and return the answer. Raises: what `failure` makes of a reason."""
        deadline = time.monotonic() + WAIT_S
        try:
            self.send_opening()
            self._connection.sendall(request)
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            raw = receive(self._connection, max_reply_bytes)
        except TimeoutError:
            raise self._failure(f"gave no answer within {WAIT_S:.0f} s") from None
        except OSError as error:
            raise self._failure(f"ended its process: {self._cause(str(error))}") from None
        if raw is None:
            raise self._failure(self._cause("its process closed the connection"))
        return raw

    def _cause(self, otherwise: str) -> str:
        """Return why the process has ended, if it has."""
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return otherwise
        if code == -signal.SIGPROF:
            return "needs too much processor time"
        return f"its process ended with code {code}" if code >= 0 else f"its process ended by signal {-code}"

    def kill(self) -> None:
        """Leave nothing of it."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _end_all(processes: list[_LimitedProcess]) -> None:
    while processes:
        processes.pop().kill()
