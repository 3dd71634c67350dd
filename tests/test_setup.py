"""`scripts/setup` in a copy of the project that has one small unit to compile."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(moeflow LANGUAGES CXX)
add_library(_cpu SHARED csrc/unit.cpp)
install(TARGETS _cpu DESTINATION moeflow/kernels)
"""
# Installs only the project itself: other packages come from this environment, so that no network is needed.
PYTHON = """#!/bin/sh
case "$*" in
*"pip install"*) case "$*" in *" -e .") ;; *) exit 0 ;; esac ;;
esac
exec "$(dirname "$0")/real-python" "$@"
"""


@pytest.fixture
def project(tmp_path):
    """A project with an environment that sees the packages of ours."""
    for name in ("constraints.txt", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    settings = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(re.sub("^license-files.*\n", "", settings, flags=re.MULTILINE))
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts")
    for folder in ("csrc", "moeflow/kernels"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "csrc" / "unit.cpp").write_text("int answer() { return 42; }\n")
    (tmp_path / "moeflow" / "__init__.py").touch()
    (tmp_path / "moeflow" / "kernels" / "__init__.py").touch()
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.rename(python.with_name("real-python"))
    python.write_text(PYTHON)
    python.chmod(0o755)
    site = next((tmp_path / ".venv").glob("lib/python*/site-packages"))
    (site / "ours.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path


def set_up(project: Path, stage: str) -> str:
    subprocess.run([project / "scripts" / "setup", stage], check=True, timeout=200)
    return (project / ".venv" / "kernels.log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_only_changed_sources_are_compiled_again(project):
    set_up(project, "run")
    (unit,) = project.glob("build/**/unit.cpp.o")
    compiled_at = unit.stat().st_mtime_ns
    (project / "moeflow" / "__init__.py").write_text("NEW = 1\n")
    (project / "moeflow" / "added").mkdir()
    (project / "moeflow" / "added" / "__init__.py").touch()
    set_up(project, "test")
    assert unit.stat().st_mtime_ns == compiled_at
    (project / "csrc" / "unit.cpp").write_text("int answer() { return 43; }\n")
    set_up(project, "test")
    assert unit.stat().st_mtime_ns > compiled_at


def test_versions_of_build_tools_are_fixed():
    """pip ignores constraints in an isolated build."""
    pinned = (ROOT / "constraints.txt").read_text()
    for name in ("scikit.build.core", "nanobind", "cmake", "ninja"):
        assert re.search(rf"^{name}==[\d.]+$", pinned, re.MULTILINE), name
