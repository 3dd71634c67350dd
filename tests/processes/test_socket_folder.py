"""The socket's folder goes with its server, or at a later start."""

from __future__ import annotations

import os
import tempfile
import time

import pytest

from moeflow.processes.socket_folder import SocketFolder, remove_left_behind


@pytest.fixture(autouse=True)
def own_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def make_old(path) -> None:
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))


def leave(folder: SocketFolder) -> None:
    """Do what the kernel does with a killed process."""
    (folder.path / "engine").touch()
    os.close(folder._descriptor)
    make_old(folder.path)


def test_only_this_user_may_enter_and_nothing_remains(tmp_path):
    folder = SocketFolder()
    assert folder.path.stat().st_mode & 0o077 == 0
    assert folder.address == f"ipc://{folder.path}/engine"
    folder.remove()
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_server_left_goes_at_the_next_start(tmp_path):
    leave(SocketFolder())
    folder = SocketFolder()
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.remove()


def test_nothing_else_is_touched(tmp_path):
    running, young, foreign = SocketFolder(), tmp_path / "moeflow-young", tmp_path / "moeflow-models"
    make_old(running.path)
    young.mkdir()
    foreign.mkdir()
    (foreign / "model.gguf").touch()
    make_old(foreign)
    (tmp_path / "moeflow-link").symlink_to(foreign)
    remove_left_behind()
    assert {path.name for path in tmp_path.iterdir()} == {running.path.name, young.name, foreign.name, "moeflow-link"}
    assert (foreign / "model.gguf").exists()
    running.remove()
