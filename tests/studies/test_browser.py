"""One function finds the browser, under every name that a system may give it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from studies.browser import NAMES, find_browser

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_each_name_alone_is_found(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_browser() is None
    program = tmp_path / name
    program.touch(mode=0o755)
    assert find_browser() == str(program)


def test_continuous_integration_installs_it_unless_it_is_found():
    text = (ROOT / ".ci" / "run").read_text()
    names = re.search(r"^browsers=\((.*?)\)", text, re.MULTILINE)
    package = re.search(r"\{browsers\[@\]\}.* meanwhile\+=\((\S+) ", text)
    assert names
    assert package
    assert tuple(names[1].split()) == NAMES
    assert package[1] in NAMES


def test_nothing_else_starts_a_browser():
    files = [path for folder in ("studies", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    starting = [path.name for path in files if "chromium.launch" in path.read_text() and path != Path(__file__)]
    assert starting == ["browser.py"]
