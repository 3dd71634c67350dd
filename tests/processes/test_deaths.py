"""Why an engine's process ended, as far as its exit code and the kernel's counters tell."""

from __future__ import annotations

import signal

import pytest

from moeflow.processes.deaths import OomKills, name_death
from tests.control_groups import HYBRID, V1_MEMORY, fake_groups

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


def test_counters_of_both_versions_of_control_groups_are_read(tmp_path):
    assert OomKills.read(tmp_path) == NONE
    files = {"../../../proc/vmstat": "pgfault 7\noom_kill 5"}
    mounts = (V1_MEMORY.format(root="/"), HYBRID.format(root="/"))
    groups = "4:memory:/a/b\n0::/user.slice/c"
    assert OomKills.read(fake_groups(tmp_path, groups, *mounts, files=files)) == kills(None, 5)
    files["memory/memory.oom_control"] = "under_oom 0\noom_kill 2"  # a container's root
    assert OomKills.read(fake_groups(tmp_path, groups, *mounts, files=files)) == kills(2, 5)
    files["memory/a/b/memory.oom_control"] = "under_oom 0\noom_kill 3"
    assert OomKills.read(fake_groups(tmp_path, groups, *mounts, files=files)) == kills(3, 5)
    files["unified/user.slice/c/memory.events"] = "oom 1\noom_kill 8"
    assert OomKills.read(fake_groups(tmp_path, "0::/user.slice/c", *mounts, files=files)) == kills(8, 5)
