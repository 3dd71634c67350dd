"""What the package's build puts into a wheel: the files that git knows of, whatever else lies in the folder."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from scripts.wheel_files import ROOT, differences, files_of_the_package, names_in

BUILD = (
    "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
)
LEFTOVERS = (
    "moeflow/kernels/__pycache__/cache.cpython-311.pyc",
    "moeflow/server/.cache/page.html.so",
    "build/x.py",
    "studies/x.py",
)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The files of a wheel without kernels, made in a copy of the repository with leftover files."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    described = ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "CMakeLists.txt", "tests/test_wheel.py")
    for name in (*described, *files_of_the_package()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in LEFTOVERS:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(b"left over")
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, check=True, capture_output=True, text=True)
    (wheel,) = out.glob("*.whl")
    return names_in(wheel)


def test_a_wheel_has_the_files_of_the_package_and_no_others(names):
    assert differences(names, has_kernels=False) == []


def test_a_wheel_has_what_is_no_python(names):
    assert "moeflow/py.typed" in names
    assert {"moeflow/server/web/vendor/katex/katex.js", "moeflow/server/web/index.html"} <= names
    assert "moeflow/train/calibration/builtin_experts.safetensors" in names
    assert any(name.endswith("licenses/moeflow/server/web/vendor/katex/LICENSE.txt") for name in names)


def test_what_is_missing_or_too_much_is_found(names):
    kernels = "moeflow/kernels/_cpu.cpython-311-x86_64-linux-gnu.so"
    assert differences({*names, kernels}) == []
    assert differences(names) == ["compiled kernels: none, where 1 is expected"]
    lacking = differences({*names, kernels} - {"moeflow/py.typed"})
    assert lacking == ["missing: moeflow/py.typed"]
    for name in ("tests/conftest.py", "moeflow/kernels/libextra.so", "moeflow.libs/libgomp.so.1"):
        assert differences({*names, kernels, name}) == [f"too much: {name}"]
