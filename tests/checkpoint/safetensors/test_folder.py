"""Hugging Face folders: tensors are read as written, and every damage is named when the folder is opened."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from tests.checkpoint.tiny_models import CONFIGS, random_weights, write_folder, write_index, write_safetensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.randn(5, 3),
        "model.norm.weight": torch.randn(3),
        "scale": torch.tensor(2.5),
        "half": torch.randn(3, 1).half(),
        "brain": torch.randn(7, 9).bfloat16(),
    }


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


class TestReading:
    @pytest.mark.parametrize("num_shards", [1, 2, 3])
    def test_tensors_are_those_written(self, tmp_path, weights, num_shards):
        checkpoint = open_checkpoint(str(write_folder(tmp_path, weights, num_shards=num_shards)))
        assert checkpoint.tensors.keys() == weights.keys()
        for name, tensor in weights.items():
            info = checkpoint.tensors[name]
            assert info.shape == tuple(tensor.shape)
            assert info.num_bytes == tensor.nbytes
            assert info.file.parent == tmp_path
            read = checkpoint.read(name)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
        checkpoint.close()

    def test_rows_are_those_of_the_tensor(self, tmp_path, weights):
        checkpoint = open_checkpoint(write_folder(tmp_path, weights))
        for name, stored_as in [("model.embed_tokens.weight", "float32"), ("brain", "bfloat16"), ("half", "float16")]:
            assert checkpoint.tensors[name].stored_as == stored_as
            for start, stop in [(0, 2), (1, 3), (2, 2)]:
                rows = checkpoint.read_rows(name, start, stop)
                assert rows.block_kind is None
                assert rows.numbers.tolist() == list(range(start, stop))
                assert torch.equal(rows.values, weights[name][start:stop])
        with pytest.raises(CheckpointError, match="not in the checkpoint"):
            checkpoint.read_rows("nothing", 0, 1)

    def test_files_of_the_safetensors_library(self, tmp_path):
        weights = random_weights("olmoe")
        write_folder(tmp_path, {})
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        checkpoint = open_checkpoint(tmp_path)
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in weights.items())
        checkpoint.close()

    def test_what_is_read_is_writable_and_its_own(self, tmp_path, weights):
        checkpoint = open_checkpoint(write_folder(tmp_path, weights))
        checkpoint.read("model.norm.weight").zero_()
        assert torch.equal(checkpoint.read("model.norm.weight"), weights["model.norm.weight"])
        checkpoint.close()

    def test_configs(self, tmp_path, weights):
        write_folder(tmp_path, weights, {"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}})
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.config["model_type"] == "llama"
        assert checkpoint.generation_config == {}
        assert checkpoint.path == tmp_path
        assert checkpoint.config_file == tmp_path / "config.json"
        checkpoint.close()
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
        assert open_checkpoint(tmp_path).generation_config == {"eos_token_id": [1, 2]}

    def test_dtype_is_what_most_bytes_are_stored_in(self, tmp_path):
        norms = {f"norm{i}": torch.ones(2) for i in range(10)}
        write_folder(tmp_path, norms | {"matrix": torch.ones(20, 20).bfloat16()})
        assert open_checkpoint(tmp_path).dtype == "bfloat16"

    def test_computed_tables_are_left_out(self, tmp_path, weights):
        tables = {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "model.embeddings.position_ids": torch.arange(9),
        }
        assert open_checkpoint(write_folder(tmp_path, weights | tables)).tensors.keys() == weights.keys()

    def test_links_into_a_download_cache(self, tmp_path, weights):
        folder = write_folder(tmp_path / "snapshot", weights)
        (tmp_path / "blob").write_bytes((folder / "model.safetensors").read_bytes())
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to("../blob")
        assert torch.equal(open_checkpoint(folder).read("brain"), weights["brain"])

    def test_unknown_tensor(self, tmp_path, weights):
        with pytest.raises(CheckpointError, match=r"tensor nothing: is not in the checkpoint"):
            open_checkpoint(write_folder(tmp_path, weights)).read("nothing")

    def test_cut_while_in_use(self, tmp_path, weights):
        checkpoint = open_checkpoint(write_folder(tmp_path, weights))
        file = tmp_path / "model.safetensors"
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 1)
        with pytest.raises(CheckpointError, match="cut while in use") as caught:
            checkpoint.read("brain")
        assert caught.value.tensor == "brain"

    def test_after_close(self, tmp_path, weights):
        checkpoint = open_checkpoint(write_folder(tmp_path, weights))
        checkpoint.close()
        checkpoint.close()
        with pytest.raises(CheckpointError):
            checkpoint.read("brain")


class TestWhatIsThere:
    def test_nothing(self, tmp_path):
        assert "does not exist" in str(refused(tmp_path / "no-such-model"))
        assert "moeflow pull" in refused(tmp_path / "owner" / "name").remedy

    def test_empty_folder(self, tmp_path):
        error = refused(tmp_path)
        assert "it is empty" in error.problem
        assert error.file == str(tmp_path)

    def test_pickle_only(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
        error = refused(tmp_path)
        assert "pytorch_model.bin" in error.problem
        assert "save_pretrained" in error.remedy
        assert "Pickle can run code" in refused(tmp_path / "pytorch_model.bin").remedy

    def test_gguf_in_a_folder(self, tmp_path):
        for name in ("model.Q4_0.gguf", "model.Q8_0.gguf"):
            (tmp_path / name).touch()
        error = refused(tmp_path)
        assert "model.Q4_0.gguf" in error.problem
        assert "instead of the folder" in error.remedy

    def test_shards_without_index(self, tmp_path, weights):
        write_folder(tmp_path, weights, num_shards=2)
        (tmp_path / "model.safetensors.index.json").unlink()
        error = refused(tmp_path)
        assert FIRST in error.problem
        assert "index.json" in error.remedy

    def test_other_files(self, tmp_path):
        for number in range(8):
            (tmp_path / f"photo{number}.jpg").touch()
        assert "photo0.jpg" in refused(tmp_path).problem
        assert "and 3 more" in refused(tmp_path).problem
        assert "no kind of model file" in refused(tmp_path / "photo0.jpg").problem

    def test_file_instead_of_folder(self, tmp_path, weights):
        write_folder(tmp_path, weights)
        assert refused(tmp_path / "model.safetensors").remedy == f"Name its folder: {tmp_path}"

    def test_dangling_link(self, tmp_path, weights):
        folder = write_folder(tmp_path, weights, num_shards=2)
        (folder / FIRST).unlink()
        (folder / FIRST).symlink_to("nowhere")
        assert FIRST in refused(folder).problem
        (folder / "model.safetensors").symlink_to("nowhere")
        assert refused(folder).problem == "is a symbolic link to nowhere, where there is nothing"


class TestConfig:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("{", "valid JSON"),
            ("[1]", "JSON list"),
            ('{"a": 1, "a": 2}', "'a' occurs twice"),
            ("[" * 100_000, "valid JSON"),
            (b"\xff\xfe", "valid JSON"),
        ],
    )
    def test_broken(self, tmp_path, weights, text, problem):
        write_folder(tmp_path, weights)
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        error = refused(tmp_path)
        assert problem in error.problem
        assert error.file == str(tmp_path / "config.json")

    def test_missing(self, tmp_path, weights):
        write_folder(tmp_path, weights)
        (tmp_path / "config.json").unlink()
        assert str(refused(tmp_path)).startswith(f"file {tmp_path / 'config.json'}: is missing.")

    def test_quantized(self, tmp_path, weights):
        write_folder(tmp_path, weights, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
        error = refused(tmp_path)
        assert "gptq" in error.problem
        assert "GGUF" in error.remedy
        write_folder(tmp_path, weights, {"quantization_config": None})
        open_checkpoint(tmp_path).close()


class TestDamagedFile:
    @pytest.fixture
    def file(self, tmp_path, weights) -> Path:
        return write_folder(tmp_path, weights) / "model.safetensors"

    def test_cut_anywhere(self, file):
        data = file.read_bytes()
        for size in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:size])
            error = refused(file.parent)
            assert error.file == str(file)
        assert error.tensor == "brain"
        assert f"ends at byte {len(data)}, the file has {len(data) - 1}" in error.problem

    def test_surplus_bytes(self, file):
        file.write_bytes(file.read_bytes() + b"x")
        assert "its header describes" in refused(file.parent).problem

    def test_absurd_header_length(self, file):
        file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])
        assert str(1 << 60) in refused(file.parent).problem

    def test_garbage_header(self, file):
        file.write_bytes(struct.pack("<Q", 40) + b"\xde\xad" * 100)
        assert "valid JSON" in refused(file.parent).problem

    def test_lfs_pointer(self, file):
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        assert "git lfs pull" in refused(file.parent).remedy

    @pytest.mark.parametrize(
        "entry",
        [
            [],
            {"dtype": "F32", "shape": [2], "data_offsets": [0]},
            {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
            {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
            {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
            {"dtype": 32, "shape": [2], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [8, 8]},
        ],
    )
    def test_wrong_entry(self, file, entry):
        write_safetensors(file, {"w": torch.ones(2)}, w=entry)
        error = refused(file.parent)
        assert error.tensor == "w"
        assert error.file == str(file)

    @pytest.mark.parametrize(
        ("offsets", "problem"), [([4, 12], "overlaps"), ([9, 17], "leaves a hole"), ([8, 1 << 70], "is cut")]
    )
    def test_wrong_offsets(self, file, offsets, problem):
        header = {"b": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}
        write_safetensors(file, {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(4)}, **header)
        error = refused(file.parent)
        assert problem in error.problem
        assert error.tensor == "b"

    def test_same_tensor_twice(self, file):
        entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
        header = b"{" + entry + b"," + entry + b"}"
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        assert "'a' occurs twice" in refused(file.parent).problem

    @pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "F64", "U32", "Q7"])
    def test_unsupported_dtype(self, file, dtype):
        header = {"w": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8]}}
        write_safetensors(file, {"w": torch.ones(2)}, **header)
        error = refused(file.parent)
        assert error.problem == f"is stored in {dtype}; supported are F32, F16, BF16"
        assert error.tensor == "w"

    @pytest.mark.parametrize("tensors", [{}, {"rotary_emb.inv_freq": torch.ones(2)}])
    def test_no_weights(self, file, tensors):
        write_safetensors(file, tensors)
        assert "holds no weights" in refused(file.parent).problem


class TestIndex:
    @pytest.fixture
    def folder(self, tmp_path, weights) -> Path:
        return write_folder(tmp_path, weights, num_shards=2)

    @staticmethod
    def weight_map(folder: Path) -> dict[str, object]:
        return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def test_missing_shard(self, folder):
        (folder / SECOND).unlink()
        error = refused(folder)
        assert error.problem == f"names 2 shards, missing of them: {SECOND}"

    def test_tensor_in_no_shard(self, folder):
        write_index(folder, self.weight_map(folder) | {"ghost": FIRST})
        error = refused(folder)
        assert (error.tensor, error.file) == ("ghost", str(folder / FIRST))
        assert f"says it is in {FIRST}, it is in none" in error.problem

    def test_tensor_in_another_shard(self, folder):
        write_index(folder, self.weight_map(folder) | {"scale": SECOND})
        error = refused(folder)
        assert f"says it is in {SECOND}, it is in {FIRST}" in error.problem
        assert error.tensor == "scale"

    def test_tensor_the_index_does_not_name(self, folder):
        weight_map = self.weight_map(folder)
        del weight_map["half"]
        write_index(folder, weight_map)
        error = refused(folder)
        assert (error.tensor, error.file) == ("half", str(folder / SECOND))
        assert f"says it is in no shard, it is in {SECOND}" in error.problem

    def test_tensor_in_two_shards(self, folder, weights):
        write_safetensors(folder / SECOND, {name: weights[name] for name in ("model.norm.weight", "half", "scale")})
        error = refused(folder)
        assert error.tensor == "scale"
        assert f"is also in {FIRST}" in error.problem

    @pytest.mark.parametrize(
        "shard",
        ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", "", "x.bin", 3, None],
    )
    def test_shard_outside_the_folder(self, folder, weights, shard):
        write_safetensors(folder.parent / "x.safetensors", weights)
        write_index(folder, self.weight_map(folder) | {"scale": shard})
        error = refused(folder)
        assert "no plain name" in error.problem
        assert error.tensor == "scale"

    @pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
    def test_no_weight_map(self, folder, content):
        (folder / "model.safetensors.index.json").write_text(content)
        assert "has no weight_map" in refused(folder).problem

    def test_pickled_index(self, tmp_path):
        (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "x.bin"}}')
        (tmp_path / "x.bin").touch()
        assert "pickled" in refused(tmp_path).problem


def test_opening_reads_no_weights(tmp_path):
    """A sparse 20 GB file opens at once, and one tensor of it can be read."""
    size = 20 * 2**30
    header = json.dumps(
        {
            "big": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]},
            "small": {"dtype": "BF16", "shape": [4], "data_offsets": [size, size + 8]},
        }
    ).encode()
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + size + 8)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["big"].num_bytes == size
    assert torch.equal(checkpoint.read("small"), torch.zeros(4, dtype=torch.bfloat16))
