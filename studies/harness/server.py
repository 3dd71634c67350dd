"""Runs `moeflow serve` for a study."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from moeflow.core.errors import EngineError

EXIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    url: str
    process: psutil.Process

    @property
    def engine(self) -> psutil.Process:
        """The engine's process that runs now; of several, the oldest."""
        return min(filter(_is_engine, self.process.children()), key=psutil.Process.create_time)


def _is_engine(process: psutil.Process) -> bool:
    """Whether this is an engine that has not ended: another process of the server renders chat templates."""
    return process.status() != psutil.STATUS_ZOMBIE and "moeflow.processes.main" in process.cmdline()


@contextmanager
def serving(model: str | None, *options: str) -> Iterator[Server]:
    """Run a fresh server. Raises: EngineError if it does not start, or ends with an error after SIGTERM."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "moeflow.cli.main", "serve", *([model] if model else [])]
        command += ["--port", "0", "--data-dir", folder, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                address = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
                if address is None:
                    raise EngineError(f"the server ended with {process.wait()} before it was ready")
                yield Server(address[0], psutil.Process(process.pid))
                process.terminate()
                if process.wait(EXIT_S):
                    raise EngineError(f"the server ended with {process.returncode}")
            finally:
                process.kill()
