"""A stopped process is noticed, and only the observer's running time counts."""

from __future__ import annotations

import os
import signal
import subprocess

from moeflow.parallel.process_watch import ProcessWatch


def test_only_a_stop_in_the_observers_own_time_counts():
    now_s = 100.0
    process = subprocess.Popen(["sleep", "60"])
    watch = ProcessWatch(process.pid, lambda: now_s)

    def looked(elapsed_s: float) -> float:
        nonlocal now_s
        now_s += elapsed_s
        watch.look()
        return watch.stopped_s

    try:
        assert looked(10) == 0
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert looked(10) == 0  # it may have stopped a moment ago
        assert looked(0.5) == 0.5
        assert looked(1) == 1.5
        assert looked(3600) == 3.5  # the observer was stopped, too
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
        assert looked(1) == 0
        assert not watch.is_stopped
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        looked(1)
        assert watch.has_ended
    finally:
        process.kill()
        process.wait()


def test_a_process_that_ended_before_is_known():
    process = subprocess.Popen(["true"])
    process.wait()
    assert ProcessWatch(process.pid).has_ended
