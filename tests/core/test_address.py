"""Addresses as people write them."""

import pytest

from moeflow.core.address import format_address, parse_address
from moeflow.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1:9200", ("10.0.0.1", 9200)), ("head.example:1", ("head.example", 1)), ("[::1]:65535", ("::1", 65535))],
)
def test_an_address_is_read_and_written(text, address):
    assert parse_address(text) == address
    assert parse_address(text, default_host="elsewhere") == address
    assert format_address(*address) == text


def test_a_port_alone_needs_a_default_host():
    assert parse_address("9200", default_host="127.0.0.1") == ("127.0.0.1", 9200)
    with pytest.raises(ConfigError, match="'9200' is no address: write HOST:PORT, with"):
        parse_address("9200")


BAD = ["", ":9200", "host", "host:", "host:0", "host:65536", "::1:9200", "host:-1", "h:¹", "h:" + "9" * 5000]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="write HOST:PORT or PORT"):
        parse_address(text, default_host="127.0.0.1")
