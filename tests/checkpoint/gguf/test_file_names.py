"""Which files are of one GGUF model, by their names alone."""

from __future__ import annotations

import pytest
from gguf.gguf_writer import SHARD_NAME_FORMAT
from hypothesis import given
from hypothesis import strategies as st

from moeflow.checkpoint.gguf.file_names import PartName, gguf_models, gguf_start, parse_part_name, whole_name


@given(st.text(), st.integers(1, 99999), st.data())
def test_names_are_those_of_the_writer(stem, count, data):
    number = data.draw(st.integers(1, count))
    name = SHARD_NAME_FORMAT.format(stem, number, count)
    assert parse_part_name(name) == PartName(stem, number, count)
    assert str(PartName(stem, number, count)) == name
    assert whole_name(name) == f"{stem}.gguf"


@pytest.mark.parametrize(
    "name",
    ["m.gguf", "m-00000-of-00002.gguf", "m-00003-of-00002.gguf", "m-1-of-2.gguf", "m-00001-of-00002.safetensors"],
)
def test_other_names_are_no_parts(name):
    assert parse_part_name(name) is None
    assert whole_name(name) == name


def test_files_of_several_models():
    paths = [
        "Q4/m-00002-of-00003.gguf",
        "Q4/m-00003-of-00003.gguf",
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
        "m-00001-of-00001.gguf",
        "m.gguf",
        "mmproj-00001-of-00002.gguf",
        "README.md",
    ]
    assert [(it.whole, it.files, it.missing) for it in gguf_models(paths)] == [
        ("Q4/m.gguf", tuple(paths[:2]), ("Q4/m-00001-of-00003.gguf",)),
        ("m.gguf", ("m.gguf",), ()),
        ("m.gguf", ("m-00001-of-00001.gguf",), ()),
        ("m.gguf", ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"), ()),
    ]


def test_where_a_model_begins(tmp_path):
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    assert gguf_start(second) == first
    assert gguf_start(tmp_path) == tmp_path
    second.touch()
    assert gguf_start(tmp_path) == first, "which is missing, and is said to be"
    (tmp_path / "model.safetensors").touch()
    assert gguf_start(tmp_path) == tmp_path
    assert gguf_start(tmp_path / "model.safetensors") == tmp_path / "model.safetensors"
