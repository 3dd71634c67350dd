from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.server.guard import strict_json
from moeflow.server.guard.strict_json import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, JsonError, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
DOCUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)


@given(DOCUMENTS, st.booleans())
def test_reads_all_json_as_pythons_own_parser_does(document, escaped):
    body = json.dumps(document, ensure_ascii=escaped).encode()
    assert parse(body) == json.loads(body) == document


@given(st.binary())
def test_any_bytes_give_what_pythons_parser_gives_or_a_reason(body):
    with contextlib.suppress(JsonError):
        assert parse(body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "line 1, column 2"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'"\xff"', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": %s}' % (b"9" * 5000), "too many digits"),
        (b'{"a": 1, "b": 2, "a": 3}', '"a" twice'),
        (b'[{"x": {"a": 1, "\\u0061": 3}}]', '"a" twice'),
        (b'{"a": "\x00"}', "not valid JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": ["\\udc00\\ud800"]}', "surrogate"),
        (b"[" * 40 + b"]" * 40, "deeper than"),
        (b"[" * 4000, "deeper than"),
        (b'{"a":' * 4000, "deeper than"),
    ],
)
def test_says_what_is_wrong(body, reason):
    with pytest.raises(JsonError, match=reason):
        parse(body)


def test_the_deepest_allowed_nesting():
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    with pytest.raises(JsonError, match="deeper"):
        parse(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


@pytest.mark.parametrize("text", [b"1.0", b"1e0", b"10.0e-1", b"1"])
def test_a_number_without_a_fraction_is_an_integer_however_it_is_written(text):
    assert type(parse(text)) is int
    assert parse(text) == 1


def test_escaped_characters_beyond_the_basic_plane_are_fine():
    assert parse(b'"\\ud83e\\udd8a \\u00fc"') == "🦊 ü"


def test_a_repeated_key_among_many_is_found_in_linear_time():
    members = b",".join(b'"%d":0' % i for i in range(150_000))
    with pytest.raises(JsonError, match='"149999" twice'):
        parse(b"{" + members + b',"149999":0}')


def test_as_many_values_as_are_allowed():
    assert len(parse(b"[" + b"7," * (MAX_VALUES - 3) + b"7]")) == MAX_VALUES - 2
    assert len(parse(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]")) == MAX_CONTAINERS - 1


@given(DOCUMENTS, st.booleans())
def test_what_stands_in_strings_is_not_counted(document, escaped):
    document = [document, json.dumps(document), "[{,\\", '"', "\\"]
    body = json.dumps(document, ensure_ascii=escaped).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "MAX_CONTAINERS", num_containers(document))
        assert parse(body) == document
        patch.setattr(strict_json, "MAX_CONTAINERS", num_containers(document) - 1)
        with pytest.raises(JsonError, match="lists and objects"):
            parse(body)


def num_containers(value):
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + sum(map(num_containers, inner))
    return 0
