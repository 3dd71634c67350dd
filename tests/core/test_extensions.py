"""Rows that other packages add to tables: their origin, the time of import, and errors that name the package."""

from __future__ import annotations

import sys

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.extensions import ExtensibleTable

GROUP = "moeflow.tests"
OWN = {"plus": int.__add__, "minus": int.__sub__}


@pytest.fixture
def install(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def install(package, points, code):
        module = package.replace("-", "_")
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{attribute}" for name, attribute in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        (tmp_path / f"{module}.py").write_text(code)
        made.append(module)

    yield install
    for module in made:
        sys.modules.pop(module, None)


def test_without_other_packages_a_table_is_what_we_have():
    table = ExtensibleTable(GROUP, OWN)
    assert dict(table) == OWN
    assert len(table) == 2
    assert "times" not in table
    with pytest.raises(KeyError):
        table["times"]


def test_another_packages_row_is_named_at_once_and_imported_when_it_is_taken(install):
    install("more-sums", {"times": "multiply"}, "multiply = int.__mul__")
    table = ExtensibleTable(GROUP, OWN)
    assert list(table) == ["plus", "minus", "times"]
    assert "times" in table
    assert len(table) == 3
    assert "more_sums" not in sys.modules
    assert table["plus"](2, 3) == 5
    assert "more_sums" not in sys.modules
    assert table["times"](2, 3) == 6


@pytest.mark.parametrize(("code", "why"), [("import nowhere", "No module named"), ("1 / 0", "ZeroDivisionError")])
def test_a_package_that_cannot_be_imported_is_blamed_and_takes_nobody_along(install, code, why):
    install("broken-sums", {"times": "multiply"}, code)
    table = ExtensibleTable(GROUP, OWN)
    with pytest.raises(ConfigError, match=rf"'times' of moeflow.tests .*the package broken-sums.*{why}"):
        table["times"]
    assert table["plus"](2, 3) == 5


def test_a_row_of_the_wrong_kind_is_refused(install):
    install("odd-sums", {"times": "multiply"}, "multiply = 7")
    with pytest.raises(ConfigError, match=r"has to be something to be called; the package odd-sums .* has a int"):
        ExtensibleTable(GROUP, OWN)["times"]
    with pytest.raises(ConfigError, match="has to be a str"):
        ExtensibleTable(GROUP, {"own": "a"}, str)["times"]


def test_a_name_that_we_have_is_not_replaced_in_silence(install):
    install("my-plus", {"plus": "plus"}, "plus = int.__mul__")
    table = ExtensibleTable(GROUP, OWN)
    assert list(table) == ["plus", "minus"]
    with pytest.raises(ConfigError, match=r"the package my-plus adds 'plus' .*which moeflow has itself: uninstall it"):
        table["plus"]
    assert table["minus"](3, 2) == 1


def test_two_packages_with_one_name_are_both_named(install):
    install("sums-a", {"times": "a"}, "a = int.__mul__")
    install("sums-b", {"times": "b"}, "b = int.__mul__")
    with pytest.raises(ConfigError, match=r"each of the packages sums-a, sums-b adds 'times'.*all but one"):
        ExtensibleTable(GROUP, OWN)["times"]


def test_files_of_other_packages_that_cannot_be_read_take_nobody_along(install, tmp_path):
    install("more-sums", {"times": "multiply"}, "multiply = int.__mul__")
    folder, loop = (tmp_path / f"{name}-1.0.dist-info" / "entry_points.txt" for name in ("aaa", "bbb"))
    folder.mkdir(parents=True)
    table = ExtensibleTable(GROUP, OWN)
    assert list(table) == ["plus", "minus", "times"]
    assert table["times"](2, 3) == 6
    loop.parent.mkdir()
    loop.symlink_to(loop)
    assert list(ExtensibleTable("moeflow.nobody", OWN)) == ["plus", "minus"]
