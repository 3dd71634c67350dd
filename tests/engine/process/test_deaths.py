"""Why an engine's process ended, as far as its exit code and the kernel's counters tell."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from moeflow.engine.process.deaths import OomKills, name_death

NONE = OomKills(of_group=None, of_system=None)


def kills(group: int | None, system: int | None) -> OomKills:
    return OomKills(of_group=group, of_system=system)


@pytest.mark.parametrize(
    ("code", "before", "after", "words", "is_from_outside"),
    [
        (1, NONE, NONE, "exit code 1", False),
        (-signal.SIGSEGV, NONE, NONE, "SIGSEGV", False),
        (-signal.SIGBUS, NONE, NONE, "SIGBUS, as when a file in use is cut", False),
        (-signal.SIGTERM, NONE, NONE, "SIGTERM", True),
        (-signal.SIGKILL, kills(3, 9), kills(4, 9), "the kernel ended it for lack of memory", False),
        (-signal.SIGKILL, kills(3, 9), kills(3, 10), "probably for lack of memory", False),
        (-signal.SIGKILL, kills(None, 9), kills(None, 10), "probably for lack of memory", False),
        (-signal.SIGKILL, NONE, NONE, "possibly for lack of memory", False),
        (-signal.SIGKILL, kills(3, 9), kills(3, 9), "another process sent it", True),
        (-signal.SIGKILL, kills(None, 9), kills(None, 9), "another process sent it", True),
        (-signal.SIGSEGV, kills(3, 9), kills(4, 10), "SIGSEGV", False),
    ],
)
def test_a_death_is_named(code, before, after, words, is_from_outside):
    death = name_death(code, before, after)
    assert words in death.reason
    assert death.is_from_outside is is_from_outside


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_counters_of_both_versions_of_control_groups_are_read(tmp_path):
    assert OomKills.read(tmp_path) == NONE
    write(tmp_path, "proc/vmstat", "pgfault 7\noom_kill 5\n")
    write(tmp_path, "proc/self/cgroup", "4:cpu,memory:/a/b\n0::/user.slice/c\n")
    assert OomKills.read(tmp_path) == kills(None, 5)
    write(tmp_path, "sys/fs/cgroup/memory/memory.oom_control", "under_oom 0\noom_kill 2\n")  # a container's root
    assert OomKills.read(tmp_path) == kills(2, 5)
    write(tmp_path, "sys/fs/cgroup/memory/a/b/memory.oom_control", "under_oom 0\noom_kill 3\n")
    assert OomKills.read(tmp_path) == kills(3, 5)
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/c\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/c/memory.events", "oom 1\noom_kill 8\n")
    assert OomKills.read(tmp_path) == kills(8, 5)
