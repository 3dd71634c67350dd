"""The small mistakes that `scripts/mutate` draws: each changes what a file means, none its texts. Gaps are found."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import mutants  # noqa: E402

FILES = [ROOT / "moeflow" / name for name in ("planner/costs/roofline.py", "pipeline/task.py", "kv/prefix_tree.py")]


def texts(source):
    """All that a line may become by an edit, without blanks and brackets."""
    edits = [edit for place in mutants.places(source) for edit in place]
    return [edit.apply(source).replace("(", "").replace(")", "").strip() for edit in edits]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a + b", {"x = a - b", "x = a", "x = b"}),
        ("x = a // b", {"x = a * b", "x = a / b", "x = a"}),
        ("x = 3", {"x = 4", "x = 2"}),
        ("x = 0.5", {"x = 1.0", "x = 0.25"}),
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a and not b", {"x = a or not b", "x = not b", "x = a", "x = a and b"}),
        ("if a: b", {"if not a: b"}),
        ("x = min(a, b)", {"x = maxa, b", "x = a", "x = b"}),
        ("x = f(a, b)", {"x = fb, a"}),
        ("x = a if b else c", {"x = a if not b else c"}),
        ("x += a", {"pass", "x -= a"}),
        ("x.y = a", {"pass"}),
        ("f()", {"pass"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if not c]"}),
        ("x = True", {"x = False"}),
        ("x = -a", {"x = a"}),
        ("x = a[0]", {"x = a[1]", "x = a[-1]"}),
        ("def f(a=1): pass", {"def fa=2: pass", "def fa=0: pass"}),
    ],
)
def test_what_a_line_may_become(line, expected):
    assert set(texts(line)) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Text with 3."""',
        "x: Final = 3",
        "assert x == 3",
        "logger.info('took %s', 3)",
        "x = f'{3}'",
        "x = 'a' + b",
        "x: int | None",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "@dataclass(slots=True)\nclass A(Base, frozen=True): ...",
        "x = zip(a, b, strict=True)",
        "x = 1e-9",
    ],
)
def test_what_is_left_as_it_is(source):
    assert mutants.places(source) == []


def test_a_raise_may_be_missing_but_its_message_stays():
    assert texts("raise Error(f'{1}', 3)") == ["pass"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_edit_is_another_program(file):
    source = file.read_text(encoding="utf-8")
    meant = ast.dump(ast.parse(source))
    for place in mutants.places(source):
        for edit in place:
            assert ast.dump(ast.parse(edit.apply(source))) != meant


def test_columns_are_bytes():
    source = "x = 'é' if a else b"
    assert [edit.apply(source) for place in mutants.places(source) for edit in place] == ["x = 'é' if (not (a)) else b"]


FILE = ROOT / "moeflow" / "pipeline" / "task.py"  # its tests need no torch
ONE_TEST = "tests/pipeline/test_task.py::test_doubled_missing_and_later_tasks_are_found"
TESTS_OF_ANOTHER_FILE = "tests/core/test_units.py"


def start(*arguments):
    environment = os.environ | {"VIRTUAL_ENV": sys.prefix}
    command = [str(ROOT / "scripts" / "mutate"), str(FILE), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.mark.slow
def test_mistakes_are_noticed_or_survive(tmp_path):
    source = FILE.read_bytes()
    with start(ONE_TEST, "-n", "3", "--json", str(tmp_path / "found.json")) as run:
        output, _ = run.communicate(timeout=250)
    assert run.returncode == 0, output
    assert FILE.read_bytes() == source
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["tried"], found["noticed"]) == (3, 2)  # no stream of this test waits for its first task
    assert [it["file"] for it in found["survivors"]] == ["moeflow/pipeline/task.py"]
    assert output.count("@@") == 2
    assert "2 of 3 noticed" in output


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing_behind():
    source = FILE.read_bytes()
    with start(TESTS_OF_ANOTHER_FILE, "-n", "50") as run:
        assert run.stdout is not None
        assert "NOT NOTICED" in run.stdout.readline()
        before = {child.pid for child in psutil.Process(run.pid).children(recursive=True)}
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=60)
    assert "interrupted" in output
    assert FILE.read_bytes() == source
    assert not [pid for pid in before if psutil.pid_exists(pid)]
