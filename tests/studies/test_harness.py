"""Turns, records and child processes of studies."""

from __future__ import annotations

import json
import sys
from itertools import count
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from moeflow.bench.tables import Table
from moeflow.core.errors import ConfigError, EngineError, GroupError
from studies.harness.children import Children
from studies.harness.command import command_line, program
from studies.harness.interleaved import interleaved, measure_interleaved, microseconds_text
from studies.harness.records import publish
from tests.studies.running import Started

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def test_arms_take_turns_in_alternating_order():
    assert list(interleaved("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_warm_ups_are_left_out():
    numbers = count()
    found = measure_interleaved({"one": lambda: next(numbers), "other": lambda: next(numbers)}, 2, warm_ups=2)
    assert found == {"one": [4, 7], "other": [5, 6]}


def test_durations_are_shown_by_their_quartiles():
    assert microseconds_text([1e-5, 2e-5, 3e-5], per=2) == "10.0 ± 5.0"


def test_a_record_has_the_command_of_its_study(tmp_path, monkeypatch, capsys):
    spec = SimpleNamespace(name="studies.some.__main__")  # pytest's workers have none
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["anywhere/some/__main__.py", "--fast", "a b"])
    assert program() == "python -m studies.some"
    record = publish("some", lambda record: Table("Found", ("",), ((record["x"],),)), tmp_path / "out.jsonl", x="1")
    assert (record["command"], record["seed"]) == ("python -m studies.some --fast 'a b'", 0)
    assert json.loads((tmp_path / "out.jsonl").read_text()) == record
    assert "Found" in capsys.readouterr().out
    publish("some", lambda _: pytest.fail("shown"), None, as_json=True, x=2)
    assert json.loads(capsys.readouterr().out)["x"] == 2
    assert command_line()[:3] == ["python", "-m", "studies.some"]


@pytest.mark.parametrize(
    ("raised", "code"), [(ConfigError("this is wrong"), 2), (EngineError("this is wrong"), 1), (OSError("is wrong"), 1)]
)
def test_an_error_is_one_line(raised, code):
    def fail() -> None:
        raise raised

    done = CliRunner().invoke(Started(click.Command("some", callback=fail)))
    assert (done.exit_code, done.stderr) == (code, f"error: {raised}\n")


def test_children_answer_and_a_lost_one_is_an_error():
    with Children() as children:
        for _ in range(2):
            children.start([sys.executable, "-c", ECHO])
        assert children.ask({"a": 1}) == [{"a": 1}, {"a": 1}]
        children.processes[1].kill()
        children.processes[1].wait()
        with pytest.raises(GroupError, match=r"process 1 .* ended with -9"):
            children.ask({"a": 2})
    assert all(process.returncode is not None for process in children.processes)
