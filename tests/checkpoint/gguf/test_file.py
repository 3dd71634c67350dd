"""GGUF files against gguf's own writer and name tables, and against the block formats' definitions."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from moeflow.checkpoint.checkpoint import StoredRows
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.weight_format import ALL_FORMATS, FORMATS, GGUF_BLOCK_KINDS
from tests.checkpoint.tiny_models import (
    CONFIGS,
    EXPERTS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    add_gguf_tensor,
    finish,
    gguf_writer,
    random_weights,
    write_folder,
    write_gguf,
)
from tests.kernels.blocks import values_of

BLOCKS = [Kind[kind] for kind in GGUF_BLOCK_KINDS]
BY_HAND = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1]  # the other kinds gguf's own reader is asked about
GRIDS = {
    Kind.IQ1_S: "LEVELS_IQ2",
    Kind.IQ1_M: "LEVELS_IQ2",
    Kind.IQ2_XXS: "LEVELS_IQ2",
    Kind.IQ2_XS: "LEVELS_IQ2",
    Kind.IQ2_S: "LEVELS_IQ2",
    Kind.IQ3_XXS: "LEVELS_IQ3_XXS",
    Kind.IQ3_S: "LEVELS_IQ3_S",
}
WIDENED = [Kind.TQ1_0, Kind.TQ2_0]


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "model.gguf"


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.file == str(path)
    return caught.value


def expected_block(kind: Kind, block: bytes) -> list[float]:
    """The 32 weights of one block, as ggml defines them."""
    if kind is Kind.Q8_0:
        (scale,) = struct.unpack("<e", block[:2])
        return [scale * q for q in struct.unpack("<32b", block[2:])]
    nibbles = [byte & 15 for byte in block[-16:]] + [byte >> 4 for byte in block[-16:]]
    if kind is Kind.Q4_0:
        (scale,) = struct.unpack("<e", block[:2])
        return [scale * (q - 8) for q in nibbles]
    scale, minimum = struct.unpack("<2e", block[:4])
    return [scale * q + minimum for q in nibbles]


def _values(rows: StoredRows) -> torch.Tensor:
    """What stored rows mean, as ggml defines blocks."""
    if rows.block_kind is None:
        return rows.values.float()
    kind = Kind[rows.block_kind]
    raw, size = rows.values.numpy().tobytes(), gguf.GGML_QUANT_SIZES[kind][1]
    blocks = [expected_block(kind, raw[start : start + size]) for start in range(0, len(raw), size)]
    return torch.tensor(blocks).reshape(len(rows.values), -1)


class TestWeights:
    @pytest.mark.parametrize("family", CONFIGS)
    @pytest.mark.parametrize("tied", [False, True])
    def test_same_as_the_hugging_face_folder(self, tmp_path, file, family, tied):
        weights = random_weights(family, tied=tied)
        folder = open_checkpoint(write_folder(tmp_path / "folder", weights, CONFIGS[family]))
        checkpoint = open_checkpoint(write_gguf(file, family, weights))
        assert checkpoint.tensors.keys() == folder.tensors.keys()
        for name, info in checkpoint.tensors.items():
            assert info.shape == folder.tensors[name].shape
            assert torch.equal(checkpoint.read(name), folder.read(name)), name
        assert checkpoint.config["tie_word_embeddings"] is tied
        assert CONFIGS[family].items() <= checkpoint.config.items()
        assert checkpoint.config["attention_bias"] is False
        assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
        assert checkpoint.path == checkpoint.config_file == file
        checkpoint.close()
        folder.close()

    @pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
    def test_attention_bias(self, file, family):
        weights = random_weights(family, bias=True)
        checkpoint = open_checkpoint(write_gguf(file, family, weights))
        assert checkpoint.config["attention_bias"] is True
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in weights.items())

    def test_rows_in_pairs_turn_into_halves(self, file):
        """Scores of q and k are the same: as stored with pairs rotated, as read with halves rotated."""
        stored_q, stored_k = torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN // 2, HIDDEN)
        writer = gguf_writer(file, "llama")
        add_gguf_tensor(writer, "blk.0.attn_q.weight", stored_q)
        add_gguf_tensor(writer, "blk.0.attn_k.weight", stored_k)
        finish(writer)
        checkpoint = open_checkpoint(file)
        read_q = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
        read_k = checkpoint.read("model.layers.0.self_attn.k_proj.weight")
        x, y = torch.randn(2, HIDDEN, dtype=torch.float64)
        angles = torch.randn(HIDDEN // HEADS // 2, dtype=torch.float64)
        group = HEADS // KV_HEADS

        def scores(q: torch.Tensor, k: torch.Tensor, rotate) -> torch.Tensor:
            q, k = (q.double() @ x).view(HEADS, -1), (k.double() @ y).view(KV_HEADS, -1)
            return (rotate(q, angles) * rotate(k, 3 * angles).repeat_interleave(group, 0)).sum(1)

        def rotate_pairs(v, angle):
            turned = torch.view_as_complex(v.reshape(len(v), -1, 2)) * torch.polar(torch.ones_like(angle), angle)
            return torch.view_as_real(turned).flatten(1)

        def rotate_halves(v, angle):
            a, b = v.chunk(2, dim=1)
            return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=1)

        torch.testing.assert_close(scores(read_q, read_k, rotate_halves), scores(stored_q, stored_k, rotate_pairs))

    @pytest.mark.parametrize("kind", BY_HAND)
    def test_blocks_by_definition(self, file, kind):
        """Random bytes, each block worked out by hand; experts are slices of their stack."""
        shape = (EXPERTS, 3, 64)
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        data = np.random.default_rng(7).integers(0, 120, (EXPERTS, 3, 2 * block_bytes), dtype=np.uint8)
        writer = gguf_writer(file, "mixtral")
        writer.add_tensor("blk.1.ffn_up_exps.weight", data, raw_dtype=kind)
        finish(writer)
        checkpoint = open_checkpoint(file)
        assert checkpoint.dtype == "float32"
        for expert in range(EXPERTS):
            name = f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight"
            raw = data[expert].tobytes()
            expected = [
                expected_block(kind, raw[start : start + block_bytes]) for start in range(0, len(raw), block_bytes)
            ]
            assert checkpoint.tensors[name].num_bytes == len(raw)
            assert checkpoint.tensors[name].shape == shape[1:]
            read = checkpoint.read(name)
            assert read.dtype is torch.float32
            torch.testing.assert_close(read, torch.tensor(expected).reshape(shape[1:]), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("kind", BY_HAND)
    def test_quantized_model_is_near_its_original(self, file, kind):
        weights = random_weights("qwen3_moe")
        checkpoint = open_checkpoint(write_gguf(file, "qwen3_moe", weights, kind))
        steps = 127 if kind is Kind.Q8_0 else 7
        for name, tensor in weights.items():
            error = (checkpoint.read(name) - tensor).abs().max()
            assert error <= tensor.abs().max() / steps, name
            assert (error == 0) == (tensor.ndim == 1), name

    @pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
    @pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *BY_HAND])
    def test_rows_are_those_of_the_tensor(self, file, family, kind):
        """Also where the file has them in another order: rows carry their numbers."""
        checkpoint = open_checkpoint(write_gguf(file, family, random_weights(family), kind))
        for name, info in checkpoint.tensors.items():
            if len(info.shape) != 2:
                continue
            found = torch.full(info.shape, torch.nan)
            for start in range(0, info.shape[0], 5):
                rows = checkpoint.read_rows(name, start, min(start + 5, info.shape[0]))
                found[rows.numbers] = _values(rows)
            assert torch.equal(found, checkpoint.read(name).float()), name
        assert info.stored_as == {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind, kind.name)

    @pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
    @pytest.mark.parametrize(
        ("kind", "weight_format"),
        [(kind, name) for kind in BY_HAND for name in ALL_FORMATS if kind.name in FORMATS[name].keeps],
    )
    def test_blocks_are_packed_without_loss(self, file, kind, weight_format):
        checkpoint = open_checkpoint(write_gguf(file, "llama", random_weights("llama"), kind))
        for name, info in checkpoint.tensors.items():
            if len(info.shape) == 2:
                packed = PackedWeight.allocate(*info.shape, weight_format)
                rows = checkpoint.read_rows(name, 0, info.shape[0])
                packed.fill(rows.values, rows.numbers, rows.block_kind)
                assert torch.equal(packed.unpack(), checkpoint.read(name)), name

    @pytest.mark.parametrize("kind", [*BLOCKS, *GRIDS, *WIDENED])
    def test_any_kind_of_blocks(self, file, kind):
        """An expert's rows, whole and in part, are what gguf's own reader makes of them; blocks come as such."""
        size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        data = np.random.default_rng(3).integers(0, 60, (EXPERTS, 5, 2 * block_bytes), dtype=np.uint8)
        values = torch.from_numpy(gguf.quants.dequantize(data, kind))
        writer = gguf_writer(file, "mixtral")
        writer.add_tensor("blk.1.ffn_up_exps.weight", data, raw_dtype=kind)
        finish(writer)
        checkpoint = open_checkpoint(file)
        name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
        assert checkpoint.tensors[name].shape == (5, 2 * size)
        assert checkpoint.tensors[name].stored_as == GRIDS.get(kind, kind.name)
        assert torch.equal(checkpoint.read(name), values[2])
        rows = checkpoint.read_rows(name, 1, 4)
        assert rows.numbers.tolist() == [1, 2, 3]
        if kind in WIDENED:
            assert rows.block_kind is None
            assert torch.equal(rows.values, values[2, 1:4])
        elif kind in GRIDS:
            assert rows.block_kind == GRIDS[kind]
            assert torch.equal(values_of(rows.block_kind, rows.values), values[2, 1:4])
        else:
            assert rows.block_kind == kind.name
            assert torch.equal(rows.values, torch.from_numpy(data[2, 1:4]))

    @pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)])
    def test_half_precision_stays_as_stored(self, file, kind, dtype):
        weights = random_weights("llama")
        checkpoint = open_checkpoint(write_gguf(file, "llama", weights, kind))
        assert checkpoint.dtype == str(dtype).removeprefix("torch.")
        assert checkpoint.read("model.norm.weight").dtype is torch.float32
        for name, tensor in weights.items():
            assert torch.equal(checkpoint.read(name), tensor if tensor.ndim == 1 else tensor.to(dtype)), name

    def test_unknown_tensor(self, file):
        checkpoint = open_checkpoint(write_gguf(file, "llama", random_weights("llama")))
        with pytest.raises(CheckpointError, match=r"tensor blk.0.attn_q.weight: is not in the checkpoint"):
            checkpoint.read("blk.0.attn_q.weight")


class TestHeader:
    @pytest.fixture
    def data(self, file) -> bytes:
        return write_gguf(file, "llama", random_weights("llama")).read_bytes()

    def test_any_suffix(self, tmp_path, file, data):
        (tmp_path / "blob").write_bytes(data)
        assert open_checkpoint(tmp_path / "blob").config["model_type"] == "llama"

    def test_cut_anywhere(self, file, data):
        for size in [*range(0, 40), 100, 500, 1000, len(data) // 2, len(data) - 1]:
            file.write_bytes(data[:size])
            assert refused(file).remedy
        assert "is cut: the tensor ends at" in refused(file).problem
        assert refused(file).tensor

    def test_bad_magic(self, file, data):
        file.write_bytes(b"GGML" + data[4:])
        assert "no GGUF file" in refused(file).problem

    def test_lfs_pointer(self, file):
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        assert "git lfs pull" in refused(file).remedy

    @pytest.mark.parametrize(
        ("version", "problem"), [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian"), (0, "version 0")]
    )
    def test_wrong_version(self, file, data, version, problem):
        file.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
        assert problem in refused(file).problem

    @pytest.mark.parametrize("offset", [8, 16, 24])
    @pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 1])
    def test_absurd_counts(self, file, data, offset, count):
        """Numbers of tensors and keys, and the length of the first string."""
        file.write_bytes(data[:offset] + struct.pack("<Q", count) + data[offset + 8 :])
        assert refused(file).remedy

    def test_version_2(self, file, data):
        file.write_bytes(data[:4] + struct.pack("<I", 2) + data[8:])
        open_checkpoint(file).close()

    def test_alignment(self, file):
        writer = gguf_writer(file, "llama")
        writer.add_custom_alignment(256)
        norm = torch.randn(HIDDEN)
        add_gguf_tensor(writer, "output_norm.weight", torch.randn(HIDDEN))
        add_gguf_tensor(writer, "blk.1.attn_norm.weight", norm)
        finish(writer)
        checkpoint = open_checkpoint(file)
        assert torch.equal(checkpoint.read("model.layers.1.input_layernorm.weight"), norm)

    def test_bad_alignment(self, file, data):
        writer = gguf_writer(file, "llama")
        writer.add_custom_alignment(64)
        add_gguf_tensor(writer, "output_norm.weight", torch.ones(HIDDEN))
        finish(writer)
        data = file.read_bytes()
        where = data.index(b"general.alignment") + len(b"general.alignment") + 4
        for alignment in (0, 48):
            file.write_bytes(data[:where] + struct.pack("<I", alignment) + data[where + 4 :])
            assert "power of two" in refused(file).problem

    def test_no_tensors(self, file):
        finish(gguf_writer(file, "llama"))
        assert "holds no weights" in refused(file).problem

    def test_overlapping_or_crooked_offsets(self, file):
        writer = gguf_writer(file, "llama")
        add_gguf_tensor(writer, "output_norm.weight", torch.ones(HIDDEN))
        add_gguf_tensor(writer, "blk.1.attn_norm.weight", torch.ones(HIDDEN))
        finish(writer)
        data = file.read_bytes()
        where = data.index(b"blk.1.attn_norm.weight") + len(b"blk.1.attn_norm.weight") + 4 + 8 + 4
        assert struct.unpack_from("<Q", data, where)[0] == 4 * HIDDEN
        for offset, problem in ((0, "overlaps"), (4 * HIDDEN - 4, "no multiple of"), (1 << 40, "is cut")):
            file.write_bytes(data[:where] + struct.pack("<Q", offset) + data[where + 8 :])
            error = refused(file)
            assert problem in error.problem
            assert problem == "overlaps" or error.tensor == "blk.1.attn_norm.weight"

    def test_same_tensor_twice(self, file):
        writer = gguf_writer(file, "llama")
        add_gguf_tensor(writer, "blk.0.attn_norm.weight", torch.ones(HIDDEN))
        add_gguf_tensor(writer, "blk.1.attn_norm.weight", torch.ones(HIDDEN))
        finish(writer)
        file.write_bytes(file.read_bytes().replace(b"blk.0.", b"blk.1."))
        assert str(refused(file)).startswith(f"file {file}, tensor blk.1.attn_norm.weight: occurs twice.")

    def test_same_key_twice(self, file, data):
        once, again = (struct.pack("<Q", len(key)) + key for key in (b"llama.embedding_length", b"llama.block_count"))
        assert data.count(once) == 1
        file.write_bytes(data.replace(once, again))
        assert "'llama.block_count' twice" in refused(file).problem

    def test_text_that_is_no_utf8(self, file, data):
        file.write_bytes(data.replace("é".encode(), b"\xff\xff"))
        assert "no UTF-8" in refused(file).problem

    @pytest.mark.parametrize("kind", [Kind.Q8_K, Kind.Q8_1, Kind.I8])
    def test_unsupported_type(self, file, kind):
        writer = gguf_writer(file, "llama")
        writer.add_tensor("token_embd.weight", np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), raw_dtype=kind)
        finish(writer)
        error = refused(file)
        assert error.tensor == "token_embd.weight"
        assert error.problem == f"is stored as {kind.name}"
        assert all(name in error.remedy for name in ("F32", "F16", "BF16", "Q8_0", "Q4_K", "IQ1_S"))

    def test_unknown_type(self, file):
        writer = gguf_writer(file, "llama")
        add_gguf_tensor(writer, "output_norm.weight", torch.ones(HIDDEN))
        finish(writer)
        data = file.read_bytes()
        where = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
        file.write_bytes(data[:where] + struct.pack("<I", 999) + data[where + 4 :])
        assert "unknown type 999" in refused(file).problem

    @pytest.mark.parametrize(
        ("number", "said"), [(31, "Q4_0_4_4, which llama.cpp dropped"), (50, "unknown type 50"), (139, "ik_llama.cpp")]
    )
    def test_types_of_others(self, file, number, said):
        writer = gguf_writer(file, "llama")
        add_gguf_tensor(writer, "output_norm.weight", torch.ones(HIDDEN))
        finish(writer)
        data = file.read_bytes()
        where = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
        file.write_bytes(data[:where] + struct.pack("<I", number) + data[where + 4 :])
        problem = refused(file).problem
        assert said in problem
        assert ("ik_llama" in problem) == (number == 139)

    @pytest.mark.parametrize(("kind", "said"), [("adapter", "LoRA"), ("mmproj", "images"), ("imatrix", "importance")])
    def test_files_that_are_no_models(self, file, kind, said):
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_type(kind)
        add_gguf_tensor(writer, "output_norm.weight", torch.ones(HIDDEN))
        finish(writer)
        error = refused(file)
        assert "is no model, but" in error.problem
        assert said in error.problem
        assert "the model itself" in error.remedy

    @pytest.mark.parametrize("size", [0, 1 << 63, 33])
    def test_impossible_shape(self, file, size):
        writer = gguf_writer(file, "llama")
        add_gguf_tensor(writer, "token_embd.weight", torch.ones(2, HIDDEN), Kind.Q8_0)
        finish(writer)
        data = file.read_bytes()
        where = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
        file.write_bytes(data[:where] + struct.pack("<Q", size) + data[where + 8 :])
        assert refused(file).tensor == "token_embd.weight"


class TestModel:
    def test_unknown_architecture(self, file):
        writer = gguf.GGUFWriter(file, "gemma2")
        add_gguf_tensor(writer, "output_norm.weight", torch.ones(HIDDEN))
        finish(writer)
        error = refused(file)
        assert "'gemma2'" in error.problem
        assert all(name in error.remedy for name in ("llama", "Mixtral", "qwen3moe", "olmoe"))

    def test_unknown_part(self, file):
        weights = random_weights("llama")
        write_gguf(file, "llama", weights)
        file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_norm", b"blk.1.ffn_nrom"))
        error = refused(file)
        assert error.tensor == "blk.1.ffn_nrom.weight"
        assert "no part of a llama model" in error.problem

    def test_experts_in_a_dense_model(self, file):
        writer = gguf_writer(file, "llama")
        add_gguf_tensor(writer, "blk.0.ffn_up_exps.weight", torch.ones(EXPERTS, 32, HIDDEN))
        finish(writer)
        assert refused(file).tensor == "blk.0.ffn_up_exps.weight"

    @pytest.mark.parametrize("shape", [(EXPERTS + 1, 32, HIDDEN), (EXPERTS,)])
    def test_wrong_number_of_experts(self, file, shape):
        writer = gguf_writer(file, "olmoe")
        add_gguf_tensor(writer, "blk.0.ffn_up_exps.weight", torch.ones(shape))
        finish(writer)
        error = refused(file)
        assert "4 experts are expected" in error.problem
        assert error.tensor == "blk.0.ffn_up_exps.weight"

    def test_rows_that_are_no_pairs(self, file):
        writer = gguf_writer(file, "llama")
        add_gguf_tensor(writer, "blk.0.attn_q.weight", torch.ones(12, HIDDEN))
        finish(writer)
        assert "no pairs for 4 heads" in refused(file).problem
