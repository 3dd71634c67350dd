from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeflow.checkpoint.checkpoint import TensorInfo
from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.core.errors import CheckpointError


class Headers:
    """As much of a checkpoint as its identity needs."""

    def __init__(self, file: Path, **changes):
        fields = {"shape": (2, 3), "num_bytes": 12, "stored_as": "bfloat16", "file": file}
        self.tensors = {"b": TensorInfo(**{**fields, **changes}), "a": TensorInfo(**fields)}


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    return file


def test_the_same_checkpoint_is_the_same(file):
    reordered = Headers(file)
    reordered.tensors = dict(reversed(reordered.tensors.items()))
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


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="gone"):
        checkpoint_identity(Headers(tmp_path / "gone"))
