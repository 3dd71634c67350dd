"""A study that is started with a Python without its packages prints one line with the remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from studies.harness import needs
from tests.documents import ROOT


def studies() -> list[str]:
    """Return the names of all studies: the modules that can be run."""
    files = [file for file in (ROOT / "studies").rglob("*.py") if "workers" not in file.parts]
    found = [file.relative_to(ROOT) for file in files if '__name__ == "__main__"' in file.read_text()]
    return sorted(".".join(file.with_suffix("").parts).removesuffix(".__main__") for file in found)


@pytest.mark.parametrize("study", studies())
def test_a_missing_package_is_one_line_with_the_remedy(study, tmp_path):
    command = [sys.executable, "-S", "-E", "-m", study, tmp_path]  # -S: without site-packages
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {study} needs the Python package ")
    assert line.endswith(needs.remedy(tmp_path, ROOT / ".venv"))
    assert (done.returncode, done.stdout) == (1, "")


def test_the_remedy_is_what_this_checkout_lacks(tmp_path):
    venv = tmp_path / ".venv"
    assert "scripts/setup` makes an environment" in needs.remedy(tmp_path, venv)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    assert needs.remedy(tmp_path, venv) == f"Run it with {venv}/bin/python"
    assert needs.remedy(venv, venv).startswith(f"Install it: {venv}/bin/pip install -e")


def test_other_errors_are_shown_in_full():
    code = "from studies.harness import needs; needs.explain_missing(); {}"
    for fault, shown in (("1 / 0", "ZeroDivisionError"), ("import studies.nothing", "No module named")):
        command = [sys.executable, "-S", "-E", "-c", code.format(fault)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert "Traceback" in done.stderr
        assert shown in done.stderr
