"""Verbs in a real control group: a refusal that names the memory, or work within the limit; never a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeflow.core.units import MIB
from moeflow.kernels.cpu import extension
from tests.control_groups import limited_group
from tests.marks import thorough_unless
from tests.packed import know_this_machine
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()), pytest.mark.slow]

LIMIT_BYTES = 400 * MIB  # less than a process is planned with where no limit is set
REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limited") / "model"
    write_tiny_mixtral(folder)
    know_this_machine(folder.parent / "cache")
    (folder.parent / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    return folder


def run(group: Path, model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a verb inside a group."""
    enter = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"))
    verb = (sys.executable, "-m", "moeflow.cli.main", *words, "--cache-dir", str(model.parent / "cache"))
    return subprocess.run((*enter, *verb), capture_output=True, text=True, timeout=60, cwd=model.parent)


@pytest.mark.parametrize(
    ("of_parent", "words"),
    thorough_unless(
        lambda of_parent, words: words[2:] in (("-p", "a"), ("--explain",)),
        [
            (False, ("generate", "model", "-p", "a")),
            (True, ("batch", "requests.jsonl", "model", "-o", "answers.jsonl")),
            (True, ("serve", "model", "--explain")),
            (False, ("serve", "model", "--explain", "--replicas", "2")),
            (True, ("generate", "model", "-p", "a", "--memory", "500MiB")),
        ],
    ),
    ids=lambda it: " ".join(it[:1] + it[3:]) if isinstance(it, tuple) else "parent's" if it else "own",
)
def test_what_does_not_fit_is_refused(model, words, of_parent):
    """Both limits are found by one function, which all verbs call: tests/core has each case of it."""
    with limited_group(LIMIT_BYTES, of_parent=of_parent) as group:
        done = run(group, model, *words)
    assert done.returncode == 2, done.stderr
    assert "MiB" in done.stderr
    assert "free" in done.stderr


def test_packing_takes_what_there_is(model):
    with limited_group(LIMIT_BYTES, of_parent=True) as group:
        done = run(group, model, "pack", "model", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["experts"] == 4
