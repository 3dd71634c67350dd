"""The types of moeflow's face, as mypy sees them in programs outside: correct use passes, mistakes are reported."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moeflow

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "data" / "types"
RIGHT, WRONG = PROGRAMS / "right.py", PROGRAMS / "wrong.py"
STRICT = ("--strict", "--disallow-any-expr", "--follow-imports=silent", "--no-error-summary")
REPORT = re.compile(r"^(?P<file>.*\.py):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]$", re.MULTILINE)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return the errors of both programs, as {file: {(line, code)}}, found by one process: the package is read once."""
    folder = tmp_path_factory.mktemp("mypy")
    config = folder / "mypy.ini"
    config.write_text(f"[mypy]\n[mypy-{','.join(unread_parts_of_torch())}]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", *STRICT, f"--config-file={config}", f"--cache-dir={folder}"]
    command += [str(RIGHT), str(WRONG)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {RIGHT: set(), WRONG: set()}
    for report in REPORT.finditer(done.stdout):
        found[folder / report["file"]].add((int(report["line"]), report["code"]))
    return found


def unread_parts_of_torch():
    """Return the modules that `scripts/check` leaves out, too: most of the time that mypy takes."""
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["overrides"]
    return next(each["module"] for each in overrides if "torch._inductor.*" in each["module"])


def test_correct_use_passes_and_no_value_is_of_any_type(reports):
    assert reports[RIGHT] == set()


def test_every_mistake_is_reported_where_it_is(reports):
    marked = re.compile(r"# error: ([\w-]+)$")
    lines = WRONG.read_text(encoding="utf-8").splitlines()
    errors = {(number, found[1]) for number, line in enumerate(lines, 1) if (found := marked.search(line))}
    assert {error for error in reports[WRONG] if error[1] != "misc"} == errors  # misc: what follows is of any type


def test_the_correct_program_uses_every_public_name():
    tree = ast.parse(RIGHT.read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(moeflow.__all__) <= names
