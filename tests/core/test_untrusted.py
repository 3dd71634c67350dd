"""Hostile text ends in one error; results equal the standard library's."""

import json
import math
import os
import threading
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core import untrusted
from moeflow.core.untrusted import UnreadableError, parse_json, parse_toml, read_bounded

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_json_is_what_was_written(value):
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == value


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[" * 5000 + b"]" * 5000, "nests too deeply"),
        (b'{"a": ' * 100_000, "nests too deeply"),
        (b"\xff", "no UTF-8"),
        (b"9" * 5000, "digits"),
        (b'{"a": 1, "a": 1}', "'a' occurs twice"),
        (b"[NaN]", "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b"[" + b"0," * 1_000_000 + b"0]", "more than 1000000 values"),
    ],
)
def test_bad_json(data, why):
    with pytest.raises(UnreadableError, match=why) as error:
        parse_json(data)
    assert len(str(error.value)) < 300


def test_a_byte_order_mark_may_stand_first():
    assert parse_json("\ufeff{}".encode()) == parse_toml("\ufeff".encode()) == {}


def test_nan_where_it_is_allowed():
    nan, least = parse_json("[NaN, -Infinity]", allows_nan=True)
    assert (math.isnan(nan), least) == (True, -math.inf)


@pytest.mark.parametrize(
    "data",
    [
        b"a = " + b"[" * 5000 + b"]" * 5000,
        b"a = " + b"{a = " * 5000,
        b"a = " + b"9" * 5000,
        b"a = 0x" + b"f" * 5000 + b"g",
        b"a",
        b"a = 1\na = 2",
        b"a = 2026-13-45",
        b"\xff = 1",
        b'a = "\xff"',
        b"# " + b"x" * (1 << 20),
        b"a = \x00",
    ],
)
def test_bad_toml(data):
    with pytest.raises(UnreadableError) as error:
        parse_toml(data)
    assert len(str(error.value)) < 300


def test_good_toml():
    text = 'a = 1\n[b.c]\nd = [1, 2, {e = "f"}]\n'
    assert parse_toml(text.encode()) == tomllib.loads(text)


@pytest.mark.parametrize("size", [0, 9, 10])
def test_files_and_pipes_of_some_bytes(tmp_path, size):
    data = bytes(range(size))
    (tmp_path / "file").write_bytes(data)
    assert read_bounded(tmp_path / "file", 10) == data
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(data,))
    writer.start()
    assert read_bounded(tmp_path / "pipe", 10) == data
    writer.join()


@pytest.mark.parametrize("name", ["/dev/zero", "large", "nothing", ".", "a\0b"])
def test_what_is_no_file_of_some_bytes(tmp_path, name):
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(UnreadableError) as error:
        read_bounded(tmp_path / name, 1 << 16)
    assert str(error.value)


def test_the_bound_of_values_counts_those_that_are_there(monkeypatch):
    monkeypatch.setattr(untrusted, "_MAX_VALUES", 4)
    assert parse_json('{"a": [1, 2, 3]}') == {"a": [1, 2, 3]}
    with pytest.raises(UnreadableError):
        parse_json('{"a": [1, 2, 3, 4]}')
