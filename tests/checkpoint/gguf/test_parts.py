"""GGUF models in several files, by gguf's own writer: as in one file, or an error that names the part."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from moeflow.checkpoint.gguf.file_names import MAX_PARTS
from moeflow.checkpoint.identity import called, content_fingerprint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.vocabulary import read_vocabulary
from moeflow.core.errors import CheckpointError
from moeflow.text.tokenizer import Tokenizer
from tests.checkpoint.tiny_models import finish, gguf_writer, random_weights, write_gguf

NAME = "llama.vocab_size"


def write_parts(folder, family="llama", kind=Kind.F32, **how):
    """Write a model in parts; return them in order."""
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "m.gguf", family, random_weights(family), kind, **(how or {"split_max_tensors": 8}))
    parts = sorted(folder.glob("m-*.gguf"))
    assert len(parts) > 2
    return parts


@pytest.fixture
def parts(tmp_path):
    """Three parts: the first has the metadata and 8 tensors."""
    return write_parts(tmp_path / "parts")


def write_part(file, values, tensors=("a",), alignment=32):
    """Write a part with any header."""
    writer = gguf.GGUFWriter(file, "llama")
    del writer.kv_data[0]["general.architecture"]
    for key, value in values.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.INT64 if value < 2**63 else gguf.GGUFValueType.UINT64)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for name in tensors:
        writer.add_tensor(name, np.ones(64, np.float32))
    finish(writer)


def tensors_of(part):
    return [tensor.name for tensor in gguf.GGUFReader(part).tensors]


def refused(path, file=None):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.file == str(file or path)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("family", "kind", "how"),
    [
        ("mixtral", Kind.F32, {"split_max_tensors": 1}),
        ("gpt_oss", Kind.BF16, {"split_max_tensors": 5}),
        ("qwen3_moe", Kind.Q8_0, {"split_max_tensors": 7, "small_first_shard": True}),
        ("gemma3_text", Kind.Q4_0, {"split_max_size": 10_000}),
    ],
)
def test_parts_are_what_one_file_is(tmp_path, family, kind, how):
    whole_file = write_gguf(tmp_path / "m.gguf", family, random_weights(family), kind)
    parts = write_parts(tmp_path / "parts", family, kind, **how)
    whole = open_checkpoint(whole_file)
    for named in (parts[0], parts[1], parts[-1], tmp_path / "parts"):
        checkpoint = open_checkpoint(named)
        assert (checkpoint.path, checkpoint.config_file) == (parts[0], parts[0])
        assert (checkpoint.config, checkpoint.generation_config) == (whole.config, whole.generation_config)
        assert checkpoint.dtype == whole.dtype
        assert list(checkpoint.tensors) == list(whole.tensors)
        assert {info.file for info in checkpoint.tensors.values()} == set(parts[how.get("small_first_shard", 0) :])
        assert content_fingerprint(checkpoint) == content_fingerprint(whole)
        for name, info in whole.tensors.items():
            assert torch.equal(checkpoint.read(name), whole.read(name)), name
            if len(info.shape) == 2:
                mine, theirs = (it.read_rows(name, 1, info.shape[0]) for it in (checkpoint, whole))
                assert torch.equal(mine.values, theirs.values)
                assert mine.block_kind == theirs.block_kind
                assert np.array_equal(mine.numbers, theirs.numbers)
        checkpoint.close()
        assert read_vocabulary(named) == read_vocabulary(whole_file)
        assert Tokenizer.load(named).encode("é zB") == Tokenizer.load(whole_file).encode("é zB")
    whole.close()
    assert called(parts[0]) == called(whole_file) == "m"


def test_a_part_alone_in_its_model(tmp_path, parts):
    for count in (None, 0, 1):
        writer = gguf_writer(tmp_path / "one-00001-of-00001.gguf", "llama")
        if count is not None:
            writer.add_uint16("split.count", count)
        writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
        finish(writer)
        checkpoint = open_checkpoint(tmp_path / "one-00001-of-00001.gguf")
        assert list(checkpoint.tensors) == ["model.norm.weight"]
        checkpoint.close()
    parts[0].rename(tmp_path / "one-00001-of-00001.gguf")
    assert "the only one" in refused(tmp_path / "one-00001-of-00001.gguf").problem


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missing_part(parts, number):
    parts[number].unlink()
    for named in (*parts[:number], *parts[number + 1 :], parts[0].parent):
        assert "is missing" in refused(named, parts[number]).problem
    assert "does not exist" in refused(parts[number]).problem


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_part_that_is_cut(parts, number):
    with parts[number].open("r+b") as stream:
        stream.truncate(parts[number].stat().st_size - 40)
    assert "is cut" in refused(parts[0], parts[number]).problem


@pytest.mark.parametrize("number", [0, 2])
def test_a_copy_of_another_part(parts, number):
    parts[1].write_bytes(parts[number].read_bytes())
    said = refused(parts[0], parts[1]).problem
    assert said == f"is called part 2 of 3, but is part {number + 1} of 3 by its header"


def test_parts_of_another_split(tmp_path, parts):
    others = write_parts(tmp_path / "others", split_max_tensors=4)
    parts[2].write_bytes(others[2].read_bytes())
    assert f"is part 3 of {len(others)} by its header" in refused(parts[0], parts[2]).problem


def test_a_tensor_in_two_parts(parts):
    name = tensors_of(parts[1])[0]
    write_part(parts[2], {"split.no": 2, "split.count": 3, "split.tensors.count": 21}, [name])
    error = refused(parts[0], parts[2])
    assert (error.tensor, error.problem) == (name, f"is also in {parts[1].name}; one of the two is wrong")


def test_tensors_that_are_in_no_part(parts):
    values = {"split.no": 2, "split.count": 3, "split.tensors.count": 21}
    assert sum(len(tensors_of(part)) for part in parts) == 21
    write_part(parts[2], values, tensors_of(parts[2])[1:])
    assert "states 21 tensors in all 3 parts, which have 20" in refused(parts[0]).problem


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"split.no": -1}, "has split.no = -1"),
        ({"split.count": 2**63}, f"has split.count = {2**63}, where a number from 0 to {MAX_PARTS}"),
        ({"split.tensors.count": 2**63}, f"has split.tensors.count = {2**63}, where "),
        ({"split.tensors.count": 20}, "has split.tensors.count = 20, where m-00001-of-00003.gguf has 21"),
        ({NAME: 47}, f"has {NAME} = 47, where m-00001-of-00003.gguf has 48"),
        ({"llama.expert_count": 8}, "has llama.expert_count = 8, where m-00001-of-00003.gguf has nothing"),
        ({"split.no": None}, "but its header has no split.no"),
        ({"split.count": None}, "but its header has no split.count"),
    ],
)
def test_a_part_that_contradicts(parts, values, said):
    known = {"split.no": 1, "split.count": 3, "split.tensors.count": 21} | values
    write_part(parts[1], {key: value for key, value in known.items() if value is not None})
    assert said in refused(parts[0], parts[1]).problem


def test_what_every_part_may_say(parts):
    tensors = {name: np.ones(64, np.float32) for name in tensors_of(parts[1])}
    said = {"split.no": 1, "split.count": 3, "split.tensors.count": 21, NAME: 48}
    write_part(parts[1], said, tensors, alignment=64)
    checkpoint = open_checkpoint(parts[0])
    assert len(checkpoint.tensors) == 21
    checkpoint.close()


def test_names_that_do_not_say_which_part(tmp_path, parts):
    first = parts[0].rename(parts[0].with_name("first.gguf"))
    error = refused(first)
    assert "is one of 3 parts of a model, but its name does not contain the number" in error.problem
    assert "first-00001-of-00003.gguf" in error.remedy
    whole = write_gguf(tmp_path / "w-00001-of-00002.gguf", "llama", random_weights("llama"))
    assert "is called part 1 of 2, but its header has no " in refused(whole).problem


def test_more_parts_than_are_opened(tmp_path):
    file = tmp_path / f"m-00001-of-{MAX_PARTS + 1:05}.gguf"
    writer = gguf_writer(file, "llama")
    for key, value in (("split.no", 0), ("split.count", MAX_PARTS + 1), ("split.tensors.count", 1)):
        writer.add_uint16(key, value)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    finish(writer)
    assert f"has split.count = {MAX_PARTS + 1}" in refused(file).problem


def test_a_folder_of_several_models_is_none(tmp_path, parts):
    write_gguf(parts[0].with_name("other.gguf"), "llama", random_weights("llama"))
    assert "instead of the folder" in refused(parts[0].parent).remedy
    parts[0].with_name("other.gguf").rename(parts[0].with_name("mmproj-other.gguf"))
    checkpoint = open_checkpoint(parts[0].parent)
    assert checkpoint.path == parts[0]
    checkpoint.close()
