"""The end of processes that were started as ranks, and are spoken to over pipes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final

EXIT_GRACE_S: Final = 5.0  # how long a rank may take to leave


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close their input, at whose end they leave. Blocks: for a moment; one that hangs is killed after some seconds."""
    for process in processes:
        close_pipe(process.stdin)
    for process in processes:
        try:
            process.wait(EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        close_pipe(process.stdout)


def close_pipe(pipe: IO[bytes] | None) -> None:
    """Close one end of a pipe, also if the other one is gone."""
    if pipe is not None:
        with suppress(BrokenPipeError):  # what was still to be written
            pipe.close()
