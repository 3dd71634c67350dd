"""Scripts that run in a process of their own: forked from one that has torch, whose threads have not begun."""

from __future__ import annotations

import os
import textwrap
import warnings
from pathlib import Path

from tests.forked import forked_context

PREAMBLE = """
    import os, threading, torch
    from moeflow.kernels.cpu import extension
    from moeflow.kernels.cpu.packed_weight import PackedWeight
    torch.set_num_threads(1)
    weight, x = PackedWeight.pack(torch.randn(200, 64), "int8"), torch.randn(9, 64)
    extension.set_num_threads(3)
    want = extension.linear(x, weight)
"""


def run_forked(script: str, folder: Path) -> None:
    """Run a script that has `extension`, `os`, `threading`, `torch`, x, weight and want (their product).

    Whatever it or one of its children writes to standard error is a failure; the folder is for that.
    """
    errors = folder / "errors"
    process = forked_context().Process(target=_run, args=(textwrap.dedent(script), errors))
    process.start()
    process.join(60)
    is_late = process.exitcode is None
    process.kill()
    assert (is_late, process.exitcode, errors.read_text()) == (False, 0, "")


def _run(script: str, errors: Path) -> None:
    written_to = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written_to, 2)
    warnings.simplefilter("ignore")  # Python warns of forks beside threads
    exec(textwrap.dedent(PREAMBLE) + script, {})
