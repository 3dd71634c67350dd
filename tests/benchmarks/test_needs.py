"""A benchmark that is started with a Python without its packages says in a line what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import needs
from tests.documents import ROOT

SCRIPTS = sorted(
    file
    for file in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*/run.py")]
    if '__name__ == "__main__"' in file.read_text() and file.name != "needs.py"
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_missing_package_is_one_line_with_the_remedy(script, tmp_path):
    started = ["-m", "benchmarks.remote_experts"] if script.name == "remote_experts.py" else [script]
    command = [sys.executable, "-S", "-E", *started, tmp_path]  # -S: without site-packages
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {script.name} needs the Python package ")
    assert line.endswith(needs.remedy(tmp_path, ROOT / ".venv"))
    assert (done.returncode, done.stdout) == (1, "")


def test_the_remedy_is_what_this_checkout_lacks(tmp_path):
    venv = tmp_path / ".venv"
    assert "scripts/setup` makes an environment" in needs.remedy(tmp_path, venv)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    assert needs.remedy(tmp_path, venv) == f"Run it with {venv}/bin/python"
    assert needs.remedy(venv, venv).startswith(f"Install it: {venv}/bin/pip install -e")


def test_other_errors_are_shown_in_full(tmp_path):
    code = "import sys; sys.path.insert(0, 'benchmarks'); import needs; needs.explain_missing(); {}"
    for fault, shown in (("1 / 0", "ZeroDivisionError"), ("import benchmarks.nothing", "No module named")):
        command = [sys.executable, "-S", "-E", "-c", code.format(fault)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert "Traceback" in done.stderr
        assert shown in done.stderr
