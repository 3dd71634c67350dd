"""NaN and infinity in weights: found where weights are read, in every form, and named."""

import math
from contextlib import closing

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.checkpoint.packed.mapped import map_weights
from moeflow.core.errors import CheckpointError
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.weight_format import BLOCK_KINDS
from moeflow.models import finite
from moeflow.models.finite import find_not_finite, is_finite
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.loading import load_model
from moeflow.models.packing import pack_model
from tests.checkpoint.tiny_models import CONFIGS, random_weights, write_folder, write_gguf
from tests.kernels.blocks import columns_of, random_blocks
from tests.models.parity import CPU, load, needs_extension, random_model
from tests.models.test_deepseek import CONFIGS as DEEPSEEK

BAD = [math.nan, math.inf, -math.inf]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
NORM = "model.layers.1.input_layernorm.weight"
ROUTER = "model.layers.0.block_sparse_moe.gate.weight"
WIDE = WeightFormats("float32", "float32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [*BAD, 0.0, -0.0, 6.5e4, -6.5e4, 6e-8])
@pytest.mark.parametrize("place", [0, 3 * 7, -1])
def test_one_float_among_many(dtype, value, place, monkeypatch):
    monkeypatch.setattr(finite, "_STRIDE", 8)
    values = torch.full((9, 7), -3.0, dtype=dtype)
    values.view(-1)[place] = value
    assert is_finite(values) is math.isfinite(value)
    assert is_finite(values[:, ::2]) is bool(values[:, ::2].isfinite().all())
    assert is_finite(values.t()) is math.isfinite(value)
    if dtype is torch.float32:
        assert is_finite(values.numpy()) is math.isfinite(value)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=8, max_size=8), st.sampled_from(FLOATS))
def test_any_bits(bits, dtype):
    values = torch.frombuffer(bytearray(bits), dtype=dtype)
    assert is_finite(values) is bool(values.isfinite().all())


@needs_extension
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_scales_of_blocks_are_judged_as_the_kernels_unpack_them(kind):
    """A NaN, of fp16 and bfloat16 alike, replaces one pair of bytes of a block, for each pair."""
    cols = 2 * columns_of(kind)
    blocks = random_blocks(kind, 3, cols)
    assert is_finite(blocks, kind)
    block_bytes = blocks.shape[1] // 2
    # Readers refuse NaN in 8-bit floats, so codes are left as they are.
    end = 4 if kind in ("F8_E4M3", "NVFP4") else block_bytes - 1
    seen = set()
    for at in range(0, end, 2):
        spoiled = blocks.clone()
        spoiled[1, block_bytes + at : block_bytes + at + 2] = torch.tensor([0xC0, 0x7F])
        values = PackedWeight.allocate(3, cols, "float32")
        values.fill(spoiled, torch.arange(3), kind)
        expected = bool(values.unpack().isfinite().all())
        assert is_finite(spoiled, kind) is is_finite(spoiled.numpy(), kind) is expected, at
        seen.add(expected)
    assert seen == ({True} if kind == "MXFP4" else {True, False})


def spoil(folder, name, value=math.nan, dtype=torch.float32):
    """Write a tiny Mixtral with one number of a tensor that is not finite."""
    weights = {key: tensor.to(dtype) for key, tensor in random_weights("mixtral").items()}
    weights[name].view(-1)[-1] = value
    return write_folder(folder, weights, CONFIGS["mixtral"])


def refused(name, take):
    with pytest.raises(CheckpointError, match="holds NaN or infinite numbers") as error:
        take()
    assert error.value.tensor == name
    assert "moeflow doctor MODEL --verify" in error.value.remedy


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", [NORM, ROUTER, EXPERT, "model.embed_tokens.weight", "lm_head.weight"])
def test_a_tensor_is_named_when_a_model_is_loaded(tmp_path, name, value):
    spoil(tmp_path, name, value)
    refused(name, lambda: load(tmp_path, torch.bfloat16))


def test_a_bias_of_a_router_is_named(tmp_path):
    """Experts would be chosen by it, whatever the tokens are."""
    theirs = random_model(DEEPSEEK["v3, as published"])
    theirs.model.layers[1].mlp.gate.e_score_correction_bias[3] = math.nan
    theirs.save_pretrained(tmp_path)
    refused("model.layers.1.mlp.gate.e_score_correction_bias", lambda: load(tmp_path))


@needs_extension
@pytest.mark.parametrize("name", [NORM, ROUTER, EXPERT, "lm_head.weight"])
@pytest.mark.parametrize("formats", [WIDE, WeightFormats("int4", "int8"), WeightFormats("bfloat16", "bfloat16")])
def test_a_tensor_is_named_when_a_model_is_packed(tmp_path, name, formats):
    spoil(tmp_path, name, dtype=torch.bfloat16)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        refused(name, lambda: pack_model(checkpoint, tmp_path / "slabs", formats, num_threads=2))


@needs_extension
def test_a_block_of_a_gguf_file_is_found(tmp_path):
    weights = random_weights("mixtral")
    file = write_gguf(tmp_path / "model.gguf", "mixtral", weights, GGMLQuantizationType.Q8_0)
    with closing(open_checkpoint(file)) as checkpoint:
        row = checkpoint.read_rows(EXPERT, 3, 4).values.numpy().tobytes()
    data = file.read_bytes()
    assert data.count(row) == 1
    file.write_bytes(data.replace(row, b"\x00\x7c" + row[2:]))
    refused(EXPERT, lambda: load(file, packed=WeightFormats("int8", "int8")))


@needs_extension
def test_small_weights_of_a_packed_model_are_looked_at(tmp_path):
    """As of a file that was packed by a version that did not look."""
    formats = WeightFormats("float32", "float32")
    with closing(open_checkpoint(spoil(tmp_path, NORM, value=1.0))) as checkpoint:
        pack_model(checkpoint, tmp_path / "slabs", formats)
        index = read_slab_index(tmp_path / "slabs")
        data, norm = index.path.read_bytes(), checkpoint.read(NORM).numpy().tobytes()
        assert data.count(norm) == 1
        index.path.write_bytes(data.replace(norm, norm[:-4] + b"\x00\x00\xc0\x7f"))
        memory = map_weights(index)
        refused(NORM, lambda: load_model(checkpoint, PackedAllocator(torch.float32, CPU, formats, memory)))


def test_all_bad_tensors_are_found_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(finite, "_READ_BYTES", 1000)
    weights = random_weights("mixtral")
    for name in (NORM, EXPERT):
        weights[name].view(-1)[-1] = math.inf
    write_folder(tmp_path, weights, CONFIGS["mixtral"])
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        reports = []
        found = find_not_finite(checkpoint, list(checkpoint.tensors), lambda *done: reports.append(done))
    assert sorted(found) == sorted([NORM, EXPERT])
    assert reports[-1][0] == reports[-1][1] == sum(tensor.nbytes for tensor in weights.values())
