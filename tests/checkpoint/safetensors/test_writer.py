import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from moeflow.checkpoint.safetensors.writer import weight_bytes, write_safetensors


def random_tensors(shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def read_all(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stream:
            assert stream.metadata() == {"format": "pt"}
            tensors |= {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    return tensors


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=8),
    max_shard_bytes=st.integers(2, 200),
)
def test_the_library_reads_back_what_was_written(tmp_path_factory, shapes, max_shard_bytes):
    folder = tmp_path_factory.mktemp("shards")
    shapes = {f"tensor.{i}": shape for i, shape in enumerate(shapes)}
    tensors = random_tensors(shapes)
    write_safetensors(folder, shapes, tensors.items(), max_shard_bytes=max_shard_bytes)
    found = read_all(folder)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stream:
            held = list(stream.keys())
            assert len(held) == 1 or sum(2 * tensors[name].numel() for name in held) <= max_shard_bytes


def test_one_shard_has_the_plain_name_and_no_index(tmp_path):
    shapes = {"a": (3, 2)}
    write_safetensors(tmp_path, shapes, random_tensors(shapes).items())
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_several_shards_have_an_index(tmp_path):
    shapes = {"a": (3,), "b": (2,), "c": (4,)}
    write_safetensors(tmp_path, shapes, random_tensors(shapes).items(), max_shard_bytes=10)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 9, "total_size": 18}
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index["weight_map"] == {"a": first, "b": first, "c": second}
    assert (tmp_path / first).is_file()
    assert (tmp_path / second).is_file()


def test_progress_counts_bytes_to_the_total(tmp_path):
    shapes = {"a": (3,), "b": (2,)}
    seen = []
    write_safetensors(
        tmp_path, shapes, random_tensors(shapes).items(), on_bytes=lambda done, total: seen.append((done, total))
    )
    assert seen == [(6, 10), (10, 10)]
    assert weight_bytes(shapes) == 10


def test_a_shard_of_tensors_is_in_memory_at_a_time(tmp_path):
    shapes = {f"tensor.{i}": (4,) for i in range(6)}

    def make():
        for number, name in enumerate(shapes):
            assert len(list(tmp_path.iterdir())) == number // 2  # shards made so far are written
            yield name, torch.ones(4, dtype=torch.bfloat16)

    write_safetensors(tmp_path, shapes, make(), max_shard_bytes=16)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_wrong_tensor_is_never_written_under_another_name(tmp_path):
    with pytest.raises(AssertionError):
        write_safetensors(tmp_path, {"a": (2,)}, [("b", torch.ones(2, dtype=torch.bfloat16))])
