"""A module in a process of its own: an order goes in, lines come out, and it ends with its reader."""

from __future__ import annotations

import pytest

from moeflow.core.apart import run_apart

PROCESSES = "tests.core.processes"


def test_lines_of_a_module_come_back():
    """`json.tool` is a module that reads JSON and writes it in lines."""
    assert list(run_apart("json.tool", b'{"a": 1}')) == [b"{\n", b'    "a": 1\n', b"}\n"]


def test_a_reader_that_leaves_ends_the_process():
    lines = run_apart("json.tool", b'["a"]')
    assert next(lines) == b"[\n"
    lines.close()  # would hang if the process were waited for, and not ended


def test_how_a_process_failed_is_told():
    with pytest.raises(ChildProcessError, match="ended with exit code 1"):
        list(run_apart("moeflow.none", b"x"))
    with pytest.raises(ChildProcessError, match="ended by SIGSEGV"):
        list(run_apart(f"{PROCESSES}.crashing", b""))


def test_a_process_that_hangs_is_ended():
    with pytest.raises(TimeoutError, match=r"longer than 0\.5 seconds"):
        list(run_apart(f"{PROCESSES}.hanging", b"", timeout_s=0.5))
    assert list(run_apart("json.tool", b"1", timeout_s=60)) == [b"1\n"]
