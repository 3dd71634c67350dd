"""What a machine offers within control groups: real ones where this system lets us make them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moeflow.core.control_groups import MemoryRoom
from moeflow.core.units import MIB
from moeflow.planner.hardware import host
from moeflow.planner.hardware.host import host_resources, num_cores_of
from tests.control_groups import limited_group

SEEN = """
import json
from moeflow.planner.hardware.host import host_resources
found = host_resources()
print(json.dumps([found.total_bytes, found.available_bytes]))
"""
WRITE = "import sys; open(sys.argv[1], 'wb').write(bytes(200 << 20))"


@pytest.mark.parametrize("of_parent", [False, True])
def test_a_real_group_s_limit_is_the_machine(tmp_path, of_parent):
    """Files that a process of the group has just written take nothing away."""
    with limited_group(300 * MIB, of_parent=of_parent) as folder:
        inside = ("sh", "-c", 'echo $$ > "$0" && "$1" -c "$2" "$4" && exec "$1" -c "$3"', str(folder / "cgroup.procs"))
        command = (*inside, sys.executable, WRITE, SEEN, str(tmp_path / "file"))
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        total, available = (int(number) for number in run.stdout.strip("[]\n").split(","))
    assert total == 300 * MIB
    assert 200 * MIB < available < 300 * MIB


def test_a_group_limits_what_the_system_has_free(monkeypatch):
    monkeypatch.setattr(host, "memory_room", lambda: MemoryRoom(1 << 60, 1 << 60))
    whole = host_resources()
    monkeypatch.setattr(host, "memory_room", lambda: MemoryRoom(300 * MIB, 20 * MIB))
    assert (host_resources().total_bytes, host_resources().available_bytes) == (300 * MIB, 20 * MIB)
    monkeypatch.setattr(host, "memory_room", lambda: MemoryRoom(300 * MIB, -5))
    assert host_resources().available_bytes == 0
    assert whole.total_bytes > 300 * MIB


@pytest.mark.parametrize(("quota", "num_cores"), [(None, 8), (3.0, 3), (1.4, 1), (1.6, 2), (0.2, 1), (64.0, 8)])
def test_a_quota_pays_for_so_many_cores(monkeypatch, quota, num_cores):
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    monkeypatch.setattr(host, "num_cores_of", lambda _: 8)
    monkeypatch.setattr(host.psutil, "cpu_count", lambda **_: 8)
    assert host_resources().num_cores == num_cores


def test_threads_of_one_core_count_once(tmp_path):
    for number, siblings in enumerate(["0,4", "1,5", "2,6", "3,7"] * 2):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert num_cores_of(range(8), tmp_path) == 4
    assert num_cores_of({0, 4}, tmp_path) == 1  # a set of processors that is one core
    assert num_cores_of({0, 5}, tmp_path) == 2
    assert num_cores_of(range(3), tmp_path / "none") == 3
