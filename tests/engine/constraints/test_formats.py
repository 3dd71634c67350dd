"""Patterns of formats, compared with parsers of such texts: Python's calendar, and lengths."""

from __future__ import annotations

import datetime
import re
from contextlib import suppress

import pytest

from moeflow.text.answer_form.json_schema import held_schema


def pattern_of(name: str) -> re.Pattern[str]:
    (part,) = held_schema({"format": name}, " ")["allOf"]
    return re.compile(part["pattern"])


def test_dates_are_those_of_the_calendar():
    pattern = pattern_of("date")
    for year in (0, 1, 4, 8, 96, 100, 400, 1000, 1900, 1996, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                is_date = False
                with suppress(ValueError):
                    is_date = datetime.date(year, month, day) is not None
                assert bool(pattern.search(text)) == is_date, text


@pytest.mark.parametrize(
    ("text", "is_time"),
    [
        ("00:00:00Z", True),
        ("23:59:59.999999999-23:59", True),
        ("19:30:00+00:00", True),
        ("24:00:00Z", False),
        ("12:60:00Z", False),
        ("12:00:60Z", False),
        ("12:00:00", False),
        ("12:00:00.Z", False),
        ("12:00Z", False),
    ],
)
def test_times_have_a_zone_and_are_read_by_python(text, is_time):
    assert bool(pattern_of("time").search(text)) == is_time
    assert bool(pattern_of("date-time").search(f"2024-02-29T{text}")) == is_time
    if is_time:
        assert datetime.datetime.fromisoformat(f"2024-02-29T{text}").tzinfo is not None
    assert not pattern_of("date-time").search(f"2023-02-29T{text}")


def test_labels_of_hosts_have_63_characters_and_announce_no_encoding():
    pattern = pattern_of("hostname")
    for length in range(1, 70):
        assert bool(pattern.search("a" * length)) == (length <= 63)
    for label in ("a", "a1", "a-b", "abc-", "a--b", "-a", "ab--c", "xn--abc", "a-b-c-d", "ab-c", "a.b", "a..b", ""):
        is_host = re.fullmatch(r"(?!-)(?!..--)[a-z0-9-]{1,63}(?<!-)(\.(?!-)(?!..--)[a-z0-9-]{1,63}(?<!-))*", label)
        assert bool(pattern.search(label)) == bool(is_host), label


def test_only_the_format_of_a_schema_is_changed():
    """Not a property of that name, nor text in values."""
    schema = {
        "properties": {"format": {"type": "string"}, "enum": {"format": "date"}},
        "const": {"format": "date"},
        "default": {"format": "date"},
        "allOf": [{"format": "uuid"}],
    }
    held = held_schema(schema, " ")
    assert held["properties"]["format"] == {"type": "string"}
    assert held["properties"]["enum"].keys() == {"allOf"}
    assert {key: held[key] for key in ("const", "default", "allOf")} == {
        key: schema[key] for key in ("const", "default", "allOf")
    }
    assert schema["properties"]["enum"] == {"format": "date"}
