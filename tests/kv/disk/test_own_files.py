"""A folder or a file that others could have changed is not used, and nothing is written through a link."""

from __future__ import annotations

import os

import pytest

from moeflow.kv.disk.extent import SUFFIX, read_extent
from moeflow.kv.disk.folder_lock import LOCK_NAME, folder_lock
from moeflow.kv.disk.folder_usage import clear_folder, folder_bytes, folder_usage
from moeflow.kv.disk.own_files import distrust
from tests.kv.disk.test_extents import folder, prefix, read, write

KEYS = prefix(1, 2, 3, 4)


@pytest.fixture
def give_away(monkeypatch):
    """Return what makes a path somebody else's, as far as this user can tell."""

    def give(path):
        try:
            os.chown(path, os.geteuid() + 1, -1)
        except PermissionError:  # only root may
            another = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: another)

    return give


@pytest.mark.parametrize("mode", [0o702, 0o777, 0o1777])
def test_a_folder_that_everybody_may_write_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match=r"can be written by every user .*chmod 700"):
        folder(tmp_path)


def test_a_folder_of_somebody_else_is_refused(tmp_path, give_away):
    give_away(tmp_path)
    with pytest.raises(PermissionError, match=r"belongs to another user \(uid \d+\)"):
        folder(tmp_path)


def test_an_own_folder_is_used_also_where_the_group_may_write(tmp_path):
    tmp_path.chmod(0o775)  # as umask 002 leaves it: whose a file is decides
    assert distrust(tmp_path) is None
    write(folder(tmp_path), KEYS)
    assert len(read(folder(tmp_path), KEYS)) == 4


def plant_other_owner(file, give_away):
    give_away(file)


def plant_writable(file, _):
    file.chmod(0o620)


def plant_link(file, _):
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def plant_fifo(file, _):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("plant", [plant_other_owner, plant_writable, plant_link, plant_fifo])
def test_a_file_that_others_could_have_put_there_is_not_read(tmp_path, give_away, plant):
    tmp_path = tmp_path / "prompts"
    write(folder(tmp_path), KEYS)
    open_before = folder(tmp_path)
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    plant(file, give_away)
    assert read_extent(file) is None
    assert read(open_before, KEYS) == []
    assert open_before.count(KEYS) == 0
    assert [one.model for one in folder_usage(tmp_path)] == ["damaged"]
    assert folder_bytes(tmp_path) < 10**5


def test_nothing_is_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    prompts = tmp_path / "prompts"
    there = folder(prompts)
    (prompts / f".{KEYS[0].hex()}{SUFFIX}.tmp").symlink_to(victim)
    write(there, KEYS)
    assert victim.read_text() == "mine"
    assert len(read(there, KEYS)) == 4
    (prompts / LOCK_NAME).unlink()
    (prompts / LOCK_NAME).symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic links"), folder_lock(prompts):
        pass
    assert not (tmp_path / "made").exists()


def test_a_link_in_a_files_place_is_deleted_and_not_what_it_leads_to(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    prompts = tmp_path / "prompts"
    there = folder(prompts, max_bytes=40_000)
    (prompts / f"old{SUFFIX}").symlink_to(victim)
    write(there, KEYS)
    there.touch(KEYS)
    clear_folder(prompts)
    assert victim.read_text() == "mine"
    assert not list(prompts.glob(f"*{SUFFIX}"))
