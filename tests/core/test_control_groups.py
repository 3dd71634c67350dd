"""Limits of control groups: each layout that systems, containers and job schedulers make."""

from __future__ import annotations

import sys

import pytest

from moeflow.core.control_groups import CPU, MEMORY, MemoryRoom, cpu_quota, group_folders, memory_room
from moeflow.core.units import MIB
from tests.control_groups import HYBRID, UNIFIED, V1_CPU, V1_MEMORY, fake_groups

SLICE = "0::/system.slice/run-r1\\x2da.service"
V1 = "5:cpu,cpuacct:/job/step\n4:memory:/job/step\n0::/"
NO_LIMIT = "9223372036854771712"  # how version 1 writes it


def mib(number: int) -> str:
    return str(number * MIB)


def memory(folder: str, limit: str, used: str, **more: str) -> dict[str, str]:
    """Return the files of version 2 in a folder ("" or ending in a slash)."""
    files = {f"{folder}memory.max": limit, f"{folder}memory.current": used}
    return files | {f"{folder}memory.{name}": text for name, text in more.items()}


def memory_v1(folder: str, limit: str, used: str, **more: str) -> dict[str, str]:
    files = {f"memory/{folder}memory.limit_in_bytes": limit, f"memory/{folder}memory.usage_in_bytes": used}
    return files | {f"memory/{folder}memory.{name}": text for name, text in more.items()}


CASES = {  # own groups, mounts, files, (limit, free) in MiB
    "no groups": ("", [], {}, None),
    "v2 root without files": ("0::/", [UNIFIED.format(root="/")], {}, None),
    "v2 no limit": ("0::/a", [UNIFIED.format(root="/")], memory("a/", "max", mib(7)), None),
    "v2 child": (
        SLICE,
        [UNIFIED.format(root="/")],
        memory("system.slice/run-r1\\x2da.service/", mib(1200), mib(200)) | memory("system.slice/", "max", mib(900)),
        (1200, 1000),
    ),
    "v2 parent only": (
        SLICE,
        [UNIFIED.format(root="/")],
        memory("system.slice/run-r1\\x2da.service/", "max", mib(10)) | memory("system.slice/", mib(1200), mib(900)),
        (1200, 300),
    ),
    "v2 the parent has less left than the child": (
        "0::/job/step",
        [UNIFIED.format(root="/")],
        memory("job/step/", mib(1000), mib(10)) | memory("job/", mib(2000), mib(1900)),
        (1000, 100),
    ),
    "v2 high": ("0::/a", [UNIFIED.format(root="/")], memory("a/", mib(2000), mib(100), high=mib(500)), (500, 400)),
    "v2 above its limit": ("0::/a", [UNIFIED.format(root="/")], memory("a/", mib(500), mib(600)), (500, -100)),
    "v2 container with a namespace": ("0::/", [UNIFIED.format(root="/")], memory("", mib(1200), mib(1)), (1200, 1199)),
    "v2 container with its group mounted": (
        "0::/docker/f00/init",
        [UNIFIED.format(root="/docker/f00")],
        memory("", mib(1200), mib(200)) | memory("init/", "max", mib(200)),
        (1200, 1000),
    ),
    "v2 moved out of its namespace": (
        "0::/../other",
        [UNIFIED.format(root="/")],
        memory("", mib(1200), mib(200)),
        (1200, 1000),
    ),
    "v2 cached files": (
        "0::/a",
        [UNIFIED.format(root="/")],
        memory(
            "a/",
            mib(3000),
            mib(2900),
            stat=f"anon {mib(60)}\nshmem {mib(40)}\nfile {mib(2840)}\nfile_dirty {mib(700)}\n"
            f"inactive_file {mib(2700)}\nactive_file {mib(90)}\nslab_reclaimable {mib(10)}",
        ),
        (3000, 2900),
    ),
    "v1 child": (V1, [V1_MEMORY.format(root="/")], memory_v1("job/step/", mib(1200), mib(200)), (1200, 1000)),
    "v1 parent only": (
        V1,
        [V1_MEMORY.format(root="/")],
        memory_v1("job/step/", NO_LIMIT, mib(200)) | memory_v1("job/", mib(1200), mib(300)),
        (1200, 900),
    ),
    "v1 container": (
        "4:memory:/docker/f00",
        [V1_MEMORY.format(root="/docker/f00")],
        memory_v1("", mib(1200), mib(200)),
        (1200, 1000),
    ),
    "v1 container that names the host's group": (
        "4:memory:/",
        [V1_MEMORY.format(root="/docker/f00")],
        memory_v1("", mib(1200), mib(200)),
        (1200, 1000),
    ),
    "v1 memory and swap": (
        V1,
        [V1_MEMORY.format(root="/")],
        memory_v1("job/", mib(1200), mib(200))
        | {"memory/job/memory.memsw.limit_in_bytes": mib(1300), "memory/job/memory.memsw.usage_in_bytes": mib(900)},
        (1200, 400),
    ),
    "v1 cached files of groups below": (
        V1,
        [V1_MEMORY.format(root="/")],
        memory_v1(
            "job/",
            mib(3000),
            mib(2900),
            stat=f"inactive_file 0\nactive_file 0\ntotal_inactive_file {mib(2700)}\ntotal_active_file {mib(100)}",
        ),
        (3000, 2900),
    ),
    "hybrid, memory in v1": (
        V1,
        [V1_MEMORY.format(root="/"), HYBRID.format(root="/")],
        memory_v1("job/step/", mib(1200), mib(200)) | {"unified/cgroup.procs": "1"},
        (1200, 1000),
    ),
    "hybrid, memory in v2": (
        "5:cpu:/job\n0::/user.slice",
        [V1_CPU.format(root="/"), HYBRID.format(root="/")],
        memory("unified/user.slice/", mib(1200), mib(200)),
        (1200, 1000),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tightest_limit_of_all_levels_counts(tmp_path, case):
    own, mounts, files, expected = CASES[case]
    root = fake_groups(tmp_path, own, *mounts, files=files)
    found = memory_room(root)
    if case.startswith("v1") and found is not None:  # an unlimited level leaves more than any machine has
        assert found.limit_bytes < int(NO_LIMIT)
    assert found == (None if expected is None else MemoryRoom(expected[0] * MIB, expected[1] * MIB))


def test_a_group_comes_before_its_ancestors_and_mounts_may_have_spaces(tmp_path):
    mount = UNIFIED.format(root="/").replace("/sys/fs/cgroup", "/my\\040groups")
    root = fake_groups(tmp_path, "0::/a/b", mount, files={})
    assert group_folders(MEMORY, root) == [root / "my groups" / name for name in ("a/b", "a", "")]
    assert group_folders(CPU, root) == group_folders(MEMORY, root)


@pytest.mark.parametrize(
    ("own", "mount", "files", "quota"),
    [
        ("0::/a/b", UNIFIED, {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", UNIFIED, {"a/b/cpu.max": "50000 100000", "a/cpu.max": "150000 100000"}, 0.5),
        ("0::/a/b", UNIFIED, {"a/b/cpu.max": "max 100000"}, None),
        (
            V1,
            V1_CPU,
            {f"cpu,cpuacct/job/cpu.cfs_{it}_us": n for it, n in (("quota", "400000"), ("period", "100000"))},
            4,
        ),
        (
            V1,
            V1_CPU,
            {f"cpu,cpuacct/job/cpu.cfs_{it}_us": n for it, n in (("quota", "-1"), ("period", "100000"))},
            None,
        ),
        ("", "", {}, None),
    ],
)
def test_the_smallest_quota_of_all_levels_counts(tmp_path, own, mount, files, quota):
    assert cpu_quota(fake_groups(tmp_path, own, mount.format(root="/"), files=files)) == quota


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_this_system_s_own_files_are_read():
    room = memory_room()
    assert room is None or room.free_bytes <= room.limit_bytes
