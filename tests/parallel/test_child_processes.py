"""The end of ranks' processes: wait for those leaving, kill those hanging, all by one deadline."""

from __future__ import annotations

import signal
import subprocess

from moeflow.parallel import child_processes
from moeflow.parallel.child_processes import end_all


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_who_leaves_is_waited_for_and_who_hangs_is_killed():
    leaving, hanging = start("cat"), start("sleep", "60")
    leaving.stdin.write(b"what nobody reads")
    end_all([hanging, leaving], grace_s=0.5)
    assert (leaving.returncode, hanging.returncode) == (0, -signal.SIGKILL)
    assert leaving.stdin.closed
    assert leaving.stdout.closed


def test_all_have_one_deadline(monkeypatch):
    """However many of them hang: a clock that only waiting moves shows how long that takes."""
    now_s = 100.0
    waits: list[float] = []

    def wait(timeout_s: float | None = None) -> int:
        nonlocal now_s
        if timeout_s is None:
            return -signal.SIGKILL
        waits.append(timeout_s)
        now_s += timeout_s
        raise subprocess.TimeoutExpired("rank", timeout_s)

    ranks = [start("true") for _ in range(3)]
    for rank in ranks:
        rank.wait()
        monkeypatch.setattr(rank, "wait", wait)
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    end_all(ranks)
    assert waits == [child_processes.EXIT_GRACE_S, 0.0, 0.0]
