"""The face of the package: all of it is listed, all that is listed is there, and importing it costs nothing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moeflow


def test_everything_listed_can_be_imported():
    for name in moeflow.__all__:
        assert getattr(moeflow, name) is not None
    assert dir(moeflow) == sorted(moeflow.__all__)


def test_everything_that_can_be_imported_is_listed():
    assert set(moeflow._MODULES) | {"__version__"} == set(moeflow.__all__)
    assert len(moeflow.__all__) == len(set(moeflow.__all__))


def test_names_are_those_of_the_modules_they_come_from():
    for name, module in moeflow._MODULES.items():
        assert getattr(moeflow, name) is getattr(sys.modules[module], name)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'LLLM'"):
        _ = moeflow.LLLM


def test_the_version_is_the_projects():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert moeflow.__version__ == project["project"]["version"]


def test_importing_moeflow_loads_nothing_heavy():
    code = "import sys, moeflow; moeflow.SamplingParams; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "msgspec"} & set(loaded)
