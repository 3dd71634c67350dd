from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch

from moeflow.checkpoint.checkpoint import StoredRows, TensorInfo, TensorTable
from moeflow.checkpoint.identity import checkpoint_identity, content_fingerprint, sampled_bytes
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.core.sha256 import sha256
from tests.tiny_mixtral import write_tiny_mixtral


class Headers:
    """As much of a checkpoint as its identity needs."""

    def __init__(self, file: Path, **changes):
        fields = {"shape": (2, 3), "num_bytes": 12, "stored_as": "bfloat16", "file": file}
        self.tensors = TensorTable({"b": TensorInfo(**{**fields, **changes}), "a": TensorInfo(**fields)})


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    return file


def test_the_same_checkpoint_is_the_same(file):
    reordered = Headers(file)
    reordered.tensors = TensorTable(reversed(reordered.tensors.items()))
    assert checkpoint_identity(Headers(file)) == checkpoint_identity(reordered)


@pytest.mark.parametrize("change", [{"shape": (3, 2)}, {"stored_as": "float16"}, {"num_bytes": 13}])
def test_another_header_is_another(file, change):
    assert checkpoint_identity(Headers(file, **change)) != checkpoint_identity(Headers(file))


def test_another_name_size_or_time_is_another(file):
    before = checkpoint_identity(Headers(file))
    os.utime(file, ns=(0, 1))
    touched = checkpoint_identity(Headers(file))
    file.write_bytes(b"weights!")
    os.utime(file, ns=(0, 1))
    grown = checkpoint_identity(Headers(file))
    renamed = checkpoint_identity(Headers(file.rename(file.with_name("other.safetensors"))))
    assert len({before, touched, grown, renamed}) == 4


def test_an_open_checkpoint_is_hashed_once_and_follows_its_files(file, monkeypatch):
    made = []

    def counted():
        made.append(sha256())
        return made[-1]

    monkeypatch.setattr("moeflow.checkpoint.checkpoint.sha256", counted)
    headers = Headers(file)
    before = checkpoint_identity(headers)
    assert checkpoint_identity(headers) == before
    file.write_bytes(b"weights!")
    assert checkpoint_identity(headers) == checkpoint_identity(Headers(file)) != before
    assert len(made) == 2, "one each for two tables"


@pytest.mark.parametrize("num_bytes", [1, 5000, 3_000_000])
def test_other_weights_of_the_same_time_and_size_are_told_apart(file, num_bytes):
    found = set()
    for number in range(3):
        file.write_bytes(bytes([number]) * num_bytes)
        os.utime(file, ns=(0, 1))
        found.add((checkpoint_identity(Headers(file)), sampled_bytes(Headers(file))))
    assert len(found) == 3
    assert sampled_bytes(Headers(file)) == sampled_bytes(Headers(file))


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="gone"):
        checkpoint_identity(Headers(tmp_path / "gone"))


def fingerprint(folder: Path) -> str:
    with closing(open_checkpoint(folder)) as checkpoint:
        return content_fingerprint(checkpoint)


def test_a_copy_has_the_same_fingerprint_and_other_weights_or_settings_another(tmp_path):
    model, copy, other = tmp_path / "model", tmp_path / "copy", tmp_path / "other"
    write_tiny_mixtral(model)
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    write_tiny_mixtral(other, seed=1)  # the same names, shapes, types and sizes
    assert fingerprint(copy) == fingerprint(model)
    assert fingerprint(other) != fingerprint(model)
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 7.0}))
    assert fingerprint(copy) != fingerprint(model)
    assert fingerprint(model) != fingerprint(copy)


def test_of_many_matrices_some_are_read(file):
    class Readable(Headers):
        """As much as its fingerprint needs."""

        def __init__(self, file: Path) -> None:
            super().__init__(file)
            self.config = {"model_type": "m"}
            info = self.tensors["a"]
            self.tensors = TensorTable({f"{number:05}": info for number in range(10_000)})
            self.num_read = 0

        def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
            self.num_read += 1
            return StoredRows(torch.zeros(stop - start, 3), torch.arange(start, stop))

    checkpoint = Readable(file)
    content_fingerprint(checkpoint)
    assert 200 <= checkpoint.num_read <= 256
