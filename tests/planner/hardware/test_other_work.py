"""What others take of the processor, by the system's own counters."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from moeflow.planner.hardware import other_work
from moeflow.planner.hardware.other_work import OtherWork

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def stat(tmp_path, monkeypatch):
    """Return a function that sets the counters, in seconds: this process, others, steal, idle."""
    file = tmp_path / "stat"

    def count(own, others, steal, idle):
        monkeypatch.setattr(other_work.os, "times", lambda: os.times_result((own, 0.0, 0.0, 0.0, 0.0)))
        fields = [own + others, 0, 0, idle, 0, 0, 0, steal, 99, 99]
        file.write_text("cpu  " + " ".join(str(int(it * TICKS)) for it in fields) + "\ncpu0 1 2 3\n")
        return file

    return count


@pytest.mark.parametrize(
    ("after", "share"),
    [
        ((16, 10, 0, 110), 0.0),
        ((12, 14, 0, 104), 0.4),
        ((12, 10, 3, 105), 0.3),
        ((20, 10, 0, 100), 0.0),
        ((10, 10, 0, 100), 0.0),
    ],
)
def test_others_and_steal_count_and_this_process_does_not(stat, after, share):
    watch = OtherWork(stat(10, 10, 0, 100))
    stat(*after)
    assert watch.share == pytest.approx(share)


def test_where_the_system_does_not_tell_nobody_is_taken_to_be_there(tmp_path):
    assert OtherWork(tmp_path / "none").share == 0.0
    (tmp_path / "odd").write_text("cpu  what\n")
    assert OtherWork(tmp_path / "odd").share == 0.0


@pytest.mark.slow
@pytest.mark.skipif(not other_work._STAT.exists(), reason="no /proc/stat")
def test_a_process_beside_this_one_is_noticed():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as beside:
        watch = OtherWork()
        time.sleep(1.0)
        share = watch.share
        beside.kill()
    assert share > 0.3 / (os.cpu_count() or 1)
