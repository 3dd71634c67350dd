"""Records hold everything needed to repeat a run, and survive a stopped run."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from moeflow.bench import records
from moeflow.bench.records import append, commit, is_dirty, is_tree_dirty, make_record, read, versions
from moeflow.core.errors import ConfigError


def test_a_record_says_where_when_and_how(tmp_path):
    record = make_record("engine", ["moeflow", "bench", "engine"], seed=7, threads=2, tokens=[1.5])
    assert (record["kind"], record["command"], record["seed"]) == ("engine", "moeflow bench engine", 7)
    assert record["machine"]["threads"] == 2
    assert {"cpu", "cores", "memory_gib", "system"} < record["machine"].keys()
    assert {"python", "torch", "moeflow"} <= record["versions"].keys()
    assert record["tokens"] == [1.5]
    append(tmp_path / "new" / "r.jsonl", record)
    append(tmp_path / "new" / "r.jsonl", record)
    assert read([tmp_path / "new" / "r.jsonl"]) == [record, record]


def test_a_command_can_be_given_to_a_shell_again():
    command = ["python", "measure.py", "--case", "decode, batch 1"]
    record = make_record("engine", command, seed=0, threads=1)
    assert shlex.split(record["command"]) == command


def test_versions_of_what_is_not_installed_are_left_out():
    assert set(versions(["torch", "no-such-package"])) == {"python", "torch"}


def test_the_commit_is_one_or_none():
    found = commit()
    assert found is None or (len(found) >= 7 and set(found) <= set("0123456789abcdef"))


def test_a_tree_is_dirty_by_its_code_alone(tmp_path, monkeypatch):
    """Records are appended to documents during other measurements, and do not make the measured tree dirty."""
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert (commit(), is_tree_dirty()) == (None, False)
    for name in ("moeflow/a.py", "docs/studies/results/r.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("old")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "c"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "docs" / "studies" / "results" / "r.jsonl").write_text("new")
    record = make_record("x", ["x"], seed=0, threads=1)
    assert (record["commit"], is_dirty(record)) == (commit(), False)
    (tmp_path / "moeflow" / "b.py").write_text("untracked")
    assert is_dirty(make_record("x", ["x"], seed=0, threads=1))
    (tmp_path / "moeflow" / "b.py").unlink()
    (tmp_path / "moeflow" / "a.py").write_text("new")
    assert is_dirty(make_record("x", ["x"], seed=0, threads=1))


def test_a_number_that_is_none_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        append(tmp_path / "r.jsonl", {"kind": "x", "value": float("nan")})
    assert (tmp_path / "r.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"kind": ', "no JSON"),
        ("[1]", "no record"),
        ('{"a": 1}', "no record, it has no kind, time"),
        (
            '{"kind": "x", "time": "", "command": "", "commit": null, "versions": {}, "machine": {"cpu": ""}}',
            "no machine.cores",
        ),
        ('{"kind": "x", "time": "", "command": "", "commit": null, "versions": {}, "machine": 3}', "no machine.cpu"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, complaint):
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(make_record("engine", [], seed=0, threads=1)) + "\n\n" + line)
    with pytest.raises(ConfigError, match=f"line 3: .*{complaint}"):
        read([file])
