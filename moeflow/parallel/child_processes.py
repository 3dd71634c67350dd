"""Processes that are started as ranks and spoken to over pipes: their start, and their end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final

EXIT_GRACE_S: Final = 5.0  # how long ranks may take to leave


def rank_command(module: str, descriptors: Sequence[int], rank: int) -> list[str]:
    """Return the command that runs a module's `main` with these descriptors and its rank as arguments."""
    arguments = [str(number) for number in (*descriptors, rank)]
    return [sys.executable, "-m", "moeflow.parallel.child_main", module, *arguments]


def start_rank(module: str, descriptors: Sequence[int], rank: int) -> subprocess.Popen[bytes]:
    """Run a module's `main` as a rank, which inherits the descriptors. Raises: OSError."""
    command = rank_command(module, descriptors, rank)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors)


def end_all(processes: Sequence[subprocess.Popen[bytes]], grace_s: float = EXIT_GRACE_S) -> None:
    """Close their input, at whose end they leave. Blocks: for a moment; one that hangs is killed after `grace_s`."""
    for process in processes:
        close_pipe(process.stdin)
    deadline_s = time.monotonic() + grace_s  # of all together
    for process in processes:
        try:
            process.wait(max(deadline_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        close_pipe(process.stdout)


def close_pipe(pipe: IO[bytes] | None) -> None:
    """Close one end of a pipe, also if the other one is gone."""
    if pipe is not None:
        with suppress(BrokenPipeError):  # unwritten bytes
            pipe.close()
