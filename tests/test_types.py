"""mypy reads programs that use moeflow's public names: the correct one passes, mistakes of the other are errors."""

import ast
import re
import tomllib
from pathlib import Path

import moeflow

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "data" / "types"
RIGHT, WRONG = PROGRAMS / "right.py", PROGRAMS / "wrong.py"


def test_mypy_reads_both_and_reports_an_ignored_error_that_does_not_occur():
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert "tests.data.types" in mypy["packages"]
    assert mypy["strict"]
    assert re.search(r"# type: ignore\[[\w-]+\]$", WRONG.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_correct_program_uses_every_public_name():
    tree = ast.parse(RIGHT.read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(moeflow.__all__) <= names
