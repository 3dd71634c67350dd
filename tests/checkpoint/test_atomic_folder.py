import errno
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from moeflow.checkpoint.atomic_folder import build_folder
from moeflow.core.errors import CapacityError, ConfigError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def make_model(folder, content="old"):
    folder.mkdir()
    (folder / "config.json").write_text(content)


def build(target, content="new", **options):
    with build_folder(target, need_bytes=1, **options) as folder:
        (folder / "config.json").write_text(content)


def test_appears_at_the_end_only(tmp_path):
    target = tmp_path / "deep" / "model"
    with build_folder(target, need_bytes=1) as folder:
        (folder / "config.json").write_text("new")
        assert not target.exists()
        assert folder.parent == target.parent  # the rename stays on one disk
    assert names(tmp_path / "deep") == ["model"]
    assert names(target) == ["config.json"]


@pytest.mark.parametrize("exception", [ValueError(), KeyboardInterrupt(), SystemExit(), OSError(errno.ENOSPC, "full")])
def test_nothing_is_left_when_interrupted(tmp_path, exception):
    def interrupted_build():
        with build_folder(tmp_path / "model", need_bytes=1) as folder:
            (folder / "part").write_text("half")
            raise exception

    with pytest.raises(type(exception)):
        interrupted_build()
    assert names(tmp_path) == []


def test_an_interrupted_overwrite_keeps_the_old_one(tmp_path):
    make_model(tmp_path / "model")
    with pytest.raises(KeyboardInterrupt), build_folder(tmp_path / "model", need_bytes=1, overwrite=True):
        raise KeyboardInterrupt
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_overwrite_replaces_everything(tmp_path):
    make_model(tmp_path / "model")
    (tmp_path / "model" / "stale.safetensors").write_text("")
    build(tmp_path / "model", overwrite=True)
    assert names(tmp_path / "model") == ["config.json"]
    assert (tmp_path / "model" / "config.json").read_text() == "new"
    assert names(tmp_path) == ["model"]


def test_a_failed_swap_puts_the_old_one_back(tmp_path, monkeypatch):
    make_model(tmp_path / "model")
    rename = type(tmp_path).rename

    def fail_on_new(path, target):
        if "building" in path.name:
            raise OSError(errno.EIO, "input/output error")
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", fail_on_new)
    with pytest.raises(OSError, match="input/output"):
        build(tmp_path / "model", overwrite=True)
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_a_swap_that_was_killed_is_undone_at_the_next_start(tmp_path):
    make_model(tmp_path / ".model.replaced")
    with pytest.raises(ConfigError, match="exists already"):
        build(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_existing_model_is_refused_without_overwrite(tmp_path):
    make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"exists already.*--overwrite"):
        build(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "old"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_model_is_never_replaced(tmp_path, overwrite):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    with pytest.raises(ConfigError, match="not a model"):
        build(tmp_path / "photos", overwrite=overwrite)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not a folder"):
        build(tmp_path / "file", overwrite=overwrite)
    assert names(tmp_path / "photos") == ["cat.jpg"]
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "model").mkdir()
    build(tmp_path / "model")
    assert names(tmp_path / "model") == ["config.json"]


def test_too_little_disk_says_need_have_and_remedy(tmp_path):
    with pytest.raises(CapacityError, match=r"need .*have .*Free some space"):
        build_folder(tmp_path / "model", need_bytes=2**60).__enter__()
    assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot build in"):
        build(tmp_path / "file" / "model")


BUILDER = """
import sys, time
from pathlib import Path
from moeflow.checkpoint.atomic_folder import build_folder
with build_folder(Path(sys.argv[1]), need_bytes=1) as folder:
    (folder / "part").write_text("half")
    print("building", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_build_is_removed_at_the_next_start_but_a_living_one_is_not(tmp_path):
    target = tmp_path / "model"
    builder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BUILDER), str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert builder.stdout.readline() == b"building\n"
        (leftover,) = names(tmp_path)
        build(target)
        assert names(tmp_path) == sorted([leftover, "model"])  # the other one lives: left alone
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait()
        assert names(tmp_path) == sorted([leftover, "model"])
        build(target, overwrite=True)
        assert names(tmp_path) == ["model"]
    finally:
        builder.kill()
        builder.communicate()
