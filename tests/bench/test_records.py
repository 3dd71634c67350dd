"""Records: they carry what is needed to repeat them, and survive a run that is stopped."""

from __future__ import annotations

import json

import pytest

from moeflow.bench.records import append, commit, make_record, read, versions
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


def test_versions_of_what_is_not_installed_are_left_out():
    assert set(versions(["torch", "no-such-package"])) == {"python", "torch"}


def test_the_commit_is_one_or_none():
    found = commit()
    assert found is None or len(found.rstrip("+")) >= 7


def test_a_number_that_is_none_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        append(tmp_path / "r.jsonl", {"kind": "x", "value": float("nan")})
    assert (tmp_path / "r.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("line", "complaint"), [('{"kind": ', "no JSON"), ("[1]", "no record"), ('{"a": 1}', "no rec")]
)
def test_a_damaged_line_is_named(tmp_path, line, complaint):
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps({"kind": "engine"}) + "\n\n" + line)
    with pytest.raises(ConfigError, match=f"line 3: {complaint}"):
        read([file])
