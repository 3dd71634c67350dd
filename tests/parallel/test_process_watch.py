"""A stopped process is noticed, and only the observer's running time counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

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


def test_a_process_is_idle_while_it_uses_neither_processor_nor_disk():
    now_s = 100.0
    command = "import sys; sys.stdin.read(1)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE)
    watch = ProcessWatch(process.pid, lambda: now_s)

    def looked(elapsed_s: float) -> float:
        nonlocal now_s
        now_s += elapsed_s
        watch.look()
        return watch.idle_s

    try:
        while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING or looked(1) < 3:
            time.sleep(0.01)  # it starts
        watch.expect()
        assert [looked(2), looked(2), looked(3600)] == [0, 2, 4]
        process.stdin.write(b"x")
        process.stdin.flush()
        while looked(0.001) > 0:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
