"""Whatever bytes a file holds, it opens and reads, or CheckpointError says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from tests.checkpoint.tiny_models import CONFIGS, random_weights, write_folder, write_gguf

FUZZ = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
# The place of the damage, as a share of the file, and the bytes written there.
FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4)
CUT = st.one_of(st.just(1.0), st.floats(0, 1))


def open_and_read(path: Path) -> None:
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        return
    for name, info in checkpoint.tensors.items():
        tensor = checkpoint.read(name)
        assert tuple(tensor.shape) == info.shape
        assert tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    checkpoint.close()


def damage(data: bytes, header_bytes: int, flips: list[tuple[float, int]], cut: float) -> bytes:
    """Overwrite bytes of the header (damaged weights are still weights) and cut the end off."""
    damaged = bytearray(data)
    for place, value in flips:
        damaged[int(place * header_bytes)] = value
    return bytes(damaged[: round(len(data) * cut)])


@pytest.mark.parametrize(("family", "kind"), [("mixtral", Kind.Q4_1), ("llama", Kind.F16)])
@FUZZ
@given(flips=FLIPS, cut=CUT)
def test_gguf(tmp_path, family, kind, flips, cut):
    file = tmp_path / "model.gguf"
    original = tmp_path / "original.gguf"
    if not original.exists():
        write_gguf(original, family, random_weights(family), kind)
    data = original.read_bytes()
    header_bytes = data.rindex(b".weight") + 40
    file.write_bytes(damage(data, header_bytes, flips, cut))
    open_and_read(file)


@FUZZ
@given(flips=FLIPS, cut=CUT)
def test_safetensors(tmp_path, flips, cut):
    folder = tmp_path / "model"
    original = tmp_path / "original"
    if not original.exists():
        write_folder(folder, random_weights("olmoe"))
        original.write_bytes((folder / "model.safetensors").read_bytes())
    data = original.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    (folder / "model.safetensors").write_bytes(damage(data, header_bytes, flips, cut))
    open_and_read(folder)


@FUZZ
@given(flips=FLIPS, cut=CUT, file=st.sampled_from(["config.json", "model.safetensors.index.json"]))
def test_json_files(tmp_path, flips, cut, file):
    folder = tmp_path / "model"
    if not folder.exists():
        write_folder(folder, random_weights("llama"), CONFIGS["llama"], num_shards=3)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(damage(data, len(data), flips, cut))
    open_and_read(folder)
    (folder / file).write_bytes(data)


@FUZZ
@given(data=st.binary(max_size=300), prefix=st.sampled_from([b"", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0\1\0\0\0\0\0\0\0"]))
def test_anything(tmp_path, data, prefix):
    (tmp_path / "model.gguf").write_bytes(prefix + data)
    open_and_read(tmp_path / "model.gguf")
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_text("{}")
    open_and_read(tmp_path)
