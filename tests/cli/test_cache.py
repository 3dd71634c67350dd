"""`moeflow cache` and the doctor: the cached prompts, their place, and deleting them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from moeflow.cli.doctor.diagnostics import kept_prompts
from moeflow.cli.kept_bytes import HISTORY_FILE
from moeflow.cli.main import main
from moeflow.kv.disk.block_keys import block_keys
from moeflow.kv.disk.extent_folder import ExtentFolder


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "cache"
    one = ExtentFolder(folder / "prompts", model="m", identity=b"i" * 32, block_bytes=1024, max_bytes=10**6)
    one.write(block_keys(b"i" * 32, range(12), 4), lambda *_: True, memoryview(bytearray(1024)))
    return folder


def shell(*arguments) -> str:
    done = CliRunner().invoke(main, ["cache", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_it_shows_what_is_kept_and_deletes_it(cache_dir):
    text = shell("--cache-dir", cache_dir)
    assert "m (6969696969696969): 3 blocks, 3." in text
    assert str(cache_dir / "prompts") in text
    (found,) = json.loads(shell(cache_dir / "prompts", "--json"))
    assert (found["model"], found["num_blocks"]) == ("m", 3)
    assert json.loads(shell("--cache-dir", cache_dir, "--clear", "--json")) == {"deleted_bytes": found["num_bytes"]}
    assert shell(cache_dir / "prompts").startswith("0 B in ")
    assert shell(cache_dir / "nothing").startswith("0 B in ")


def test_it_says_what_lies_where_and_deletes_what_is_made_again(cache_dir):
    for place, num_bytes in {"experts/a.slabs": 1000, "routing/b.json": 20, "jobs/files/c": 3, HISTORY_FILE: 7}.items():
        (cache_dir / place).parent.mkdir(parents=True, exist_ok=True)
        (cache_dir / place).write_bytes(bytes(num_bytes))
    whole = json.loads(shell("--cache-dir", cache_dir, "--json"))
    sizes = {place["what"]: place["num_bytes"] for place in whole["places"]}
    assert (sizes["packed weights"], sizes["records of routing"], sizes["files and batch jobs"]) == (1000, 20, 3)
    assert sizes["inputs of chats"] == 7
    assert sizes["prompts and answers"] == whole["prompts"][0]["num_bytes"]
    assert f"packed weights            1000 B  {cache_dir}/experts" in shell("--cache-dir", cache_dir)
    assert json.loads(shell("--cache-dir", cache_dir, "--clear-packed", "--json")) == {"deleted_bytes": 1020}
    assert sorted(it.name for it in cache_dir.rglob("*") if it.is_file() and "prompts" not in it.parts) == [
        "c",
        HISTORY_FILE,
    ]


def test_the_doctor_says_where_it_lies(cache_dir):
    (finding,) = kept_prompts(cache_dir / "prompts")
    assert finding.verdict == "ok"
    assert str(cache_dir / "prompts") in finding.found
    assert kept_prompts(cache_dir / "nothing") == []
