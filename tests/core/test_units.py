from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError
from moeflow.core.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * 1024**3),
        (" 500 MB ", 500_000_000),
        ("1.5g", 3 * 512 * 1024**2),
        ("1048576", 1048576),
        ("2KB", 2000),
    ],
)
def test_sizes_are_read(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "4 parsecs", "-1GiB", "0", "GiB", "1e3", "0.2 b", "9" * 5000, "9" * 400 + "GiB"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="bytes"):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_written_sizes_read_back_within_rounding(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.05)


@pytest.mark.parametrize("num_bytes", [1024**3 - 1, 1024**3, 1024**3 - 40 * 1024])
def test_what_rounds_to_the_next_unit_is_written_in_it(num_bytes):
    assert format_bytes(num_bytes) == "1.0 GiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0125, "12.5 ms"),
        (0.9996, "1 s"),
        (1.25, "1.25 s"),
        (89.855, "89.9 s"),
        (99.96, "1.67 min"),
        (1515, "25.2 min"),
        (12_600, "3.5 h"),
    ],
)
def test_times_are_written_as_people_read_them(seconds, text):
    assert format_seconds(seconds) == text
