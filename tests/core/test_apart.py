"""A module in a process of its own: an order goes in, lines come out, and it ends with its reader."""

from __future__ import annotations

from moeflow.core.apart import run_apart


def test_lines_of_a_module_come_back():
    """`json.tool` is a module that reads JSON and writes it in lines."""
    assert list(run_apart("json.tool", b'{"a": 1}')) == [b"{\n", b'    "a": 1\n', b"}\n"]


def test_a_reader_that_leaves_ends_the_process():
    lines = run_apart("json.tool", b'["a"]')
    assert next(lines) == b"[\n"
    lines.close()  # would hang if the process were waited for, and not ended


def test_a_module_that_is_not_there_says_nothing():
    assert list(run_apart("moeflow.none", b"x")) == []
