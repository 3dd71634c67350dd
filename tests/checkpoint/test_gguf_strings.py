"""Strings of a vocabulary are cut from large pieces of the file: the same ones, wherever the pieces end.

Reading weights skips them, and keeps a checksum only.
"""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import gguf
import numpy as np
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


@given(strings=st.lists(st.text(max_size=12), max_size=20), piece_bytes=st.integers(1, 60))
def test_who_goes_past_them_comes_to_what_follows_and_knows_them_again(strings, piece_bytes, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header, "_PIECE_BYTES", piece_bytes)
        reader = cursor(encoded(strings) + b"rest", tmp_path_factory)
        assert reader.pass_strings(len(strings)) == (zlib.crc32(encoded(strings)), {})
        assert reader.take(4) == b"rest"
        reader._stream.close()


@pytest.mark.parametrize("content", [encoded(["one"]) + b"\x03\x00", encoded(["one"]) + struct.pack("<Q", 4) + b"two"])
def test_who_goes_past_them_notices_that_they_are_cut(content, tmp_path_factory):
    reader = cursor(content, tmp_path_factory)
    with pytest.raises(CheckpointError, match="is truncated"):
        reader.pass_strings(2)
    reader._stream.close()


def write_model(file, tokens, **metadata):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(number) for number in range(len(tokens))])
    writer.add_token_types([1] * len(tokens))
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    writer.add_tensor("one", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_without_a_vocabulary_all_else_is_the_same_and_memory_small(tmp_path):
    tokens = [f"token {number}" for number in range(30_000)]
    file = write_model(tmp_path / "model.gguf", tokens, more=7)
    whole = header.read_gguf_header(file)
    assert whole.metadata["tokenizer.ggml.tokens"] == tokens
    tracemalloc.start()
    without = header.read_gguf_header(file, with_vocabulary=False)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1.5 * header._PIECE_BYTES  # with it, 4 MiB
    assert (without.tensors, without.metadata.keys()) == (whole.tensors, whole.metadata.keys())
    passed = {key for key, value in without.metadata.items() if isinstance(value, header.PassedArray)}
    assert passed == {f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type")}
    assert all(without.metadata[key] == whole.metadata[key] for key in whole.metadata.keys() - passed)


def test_passed_arrays_are_the_same_where_their_bytes_are(tmp_path):
    tokens = [f"token {number}" for number in range(5000)]
    other = [*tokens[:-1], "token 5000"]

    def passed(name, tokens, **metadata):
        file = write_model(tmp_path / name, tokens, **metadata)
        return header.read_gguf_header(file, with_vocabulary=False).metadata

    first, moved, changed = passed("a", tokens), passed("b", tokens, more=1), passed("c", other)
    for name in ("tokens", "scores", "token_type"):
        assert first[f"tokenizer.ggml.{name}"] == moved[f"tokenizer.ggml.{name}"]
    assert first["tokenizer.ggml.tokens"] != changed["tokenizer.ggml.tokens"]
    assert first["tokenizer.ggml.scores"] == changed["tokenizer.ggml.scores"] != first["tokenizer.ggml.token_type"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (encoded(["one"]) + struct.pack("<Q", 4) + b"two", "is truncated"),
        (encoded(["one"]) + b"\x03\x00", "is truncated"),
        (encoded(["one"]) + struct.pack("<Q", 1 << 62), "of length"),
        (encoded(["one"]) + struct.pack("<Q", 2) + b"\xff\xff", "no UTF-8 before byte 21"),
    ],
)
def test_damaged_ones_are_refused(content, problem, tmp_path_factory):
    reader = cursor(content, tmp_path_factory)
    with pytest.raises(CheckpointError, match=problem):
        reader.strings(2)
    reader._stream.close()
