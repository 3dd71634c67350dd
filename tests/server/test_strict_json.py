from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.server.guard.strict_json import MAX_DEPTH, JsonError, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
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
        (b'{"a": "x\\u0000y"}', "NUL"),
        (b'{"a\\u0000": 1}', "NUL"),
        (b'{"a": "\x00"}', "not valid JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": ["\\udc00\\ud800"]}', "surrogate"),
        (b"[" * 40 + b"]" * 40, "deeper than"),
        (b"[" * 100_000, "deeper than"),
        (b'{"a":' * 100_000, "deeper than"),
    ],
)
def test_says_what_is_wrong(body, reason):
    with pytest.raises(JsonError, match=reason):
        parse(body)


def test_the_deepest_allowed_nesting():
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    with pytest.raises(JsonError, match="deeper"):
        parse(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


def test_escaped_characters_beyond_the_basic_plane_are_fine():
    assert parse(b'"\\ud83e\\udd8a \\u00fc"') == "🦊 ü"
