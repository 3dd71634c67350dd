"""The kernel ends a worker that uses more processor time than one piece of work may take."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WORK = """
import sys, time
from moeflow.text.worker_limits import limit_cpu_time
for used_s in map(float, sys.argv[1:]):
    limit_cpu_time(0.3)
    end_s = time.process_time() + used_s
    while time.process_time() < end_s:
        pass
"""


@pytest.mark.parametrize(
    ("pieces_s", "code"), [(["0.2", "0.2", "0.2"], 0), (["0.9"], -signal.SIGPROF), (["0.2", "0.9"], -signal.SIGPROF)]
)
def test_each_piece_of_work_has_so_much_time(pieces_s, code):
    assert subprocess.run([sys.executable, "-c", WORK, *pieces_s], check=False).returncode == code
