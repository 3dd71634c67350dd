"""Strings of a vocabulary are cut from large pieces of the file: the same ones, wherever the pieces end."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.checkpoint.gguf import header
from moeflow.core.errors import CheckpointError


def cursor(content, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "strings"
    file.write_bytes(content)
    return header._Cursor(file.open("rb"), file)


def encoded(strings):
    return b"".join(struct.pack("<Q", len(data)) + data for data in (string.encode() for string in strings))


@given(strings=st.lists(st.text(max_size=12), max_size=20), piece_bytes=st.integers(1, 60))
def test_they_are_the_same_however_pieces_end(strings, piece_bytes, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header, "_PIECE_BYTES", piece_bytes)
        reader = cursor(encoded(strings) + b"rest", tmp_path_factory)
        assert reader.strings(len(strings)) == strings
        assert reader.take(4) == b"rest"
        reader._stream.close()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (encoded(["one"]) + struct.pack("<Q", 4) + b"two", "is cut"),
        (encoded(["one"]) + b"\x03\x00", "is cut"),
        (encoded(["one"]) + struct.pack("<Q", 1 << 62), "of length"),
        (encoded(["one"]) + struct.pack("<Q", 2) + b"\xff\xff", "no UTF-8 before byte 21"),
    ],
)
def test_damaged_ones_are_refused(content, problem, tmp_path_factory):
    reader = cursor(content, tmp_path_factory)
    with pytest.raises(CheckpointError, match=problem):
        reader.strings(2)
    reader._stream.close()
