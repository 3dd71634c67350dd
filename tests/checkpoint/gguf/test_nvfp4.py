"""GGUF's NVFP4 against the gguf package, and against the same numbers in ModelOpt's layout."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.kernels.cpu import extension
from tests.checkpoint.packings import QUANTIZATIONS
from tests.checkpoint.quantized_models import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    write_quantized_model,
)
from tests.checkpoint.tiny_models import add_gguf_tensor, finish, gguf_writer
from tests.engine.streamed_runs import run
from tests.engine.test_block_models import PROMPTS, config_of
from tests.kernels.blocks import values_of

NAME, READ_AS = "blk.0.ffn_up", "model.layers.0.mlp.up_proj.weight"
IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}


def repacked(pairs, scales):
    """Four groups of 16 numbers a block, byte j of a group with numbers j and j + 8: [.., bytes of a row] uint8."""
    numbers = torch.stack([pairs & 15, pairs >> 4], dim=-1).reshape(*pairs.shape[:-1], -1, 4, 2, 8)
    halves = numbers[..., 0, :] | numbers[..., 1, :] << 4
    heads = scales.view(torch.uint8).reshape(*halves.shape[:-2], 4)
    return torch.cat([heads, halves.flatten(-2)], dim=-1).flatten(-2).numpy()


def add_nvfp4(writer, name, raw, factors=None):
    writer.add_tensor(f"{name}.weight", raw, raw_dtype=Kind.NVFP4)
    if factors is not None:
        writer.add_tensor(f"{name}.scale", np.asarray(factors, np.float32))
        writer.add_tensor(f"{name}.input_scale", np.ones_like(factors, np.float32))


def write_matrix(file, raw, factors=None):
    writer = gguf_writer(file, "llama")
    add_nvfp4(writer, NAME, raw, factors)
    finish(writer)
    return open_checkpoint(file)


@pytest.mark.parametrize("factor", [None, 0.125])
def test_any_bytes_mean_what_the_gguf_package_says(tmp_path, factor):
    raw = np.random.default_rng(0).integers(0, 256, (40, 36 * 8), np.uint8)
    raw[:4, :4] = np.arange(120, 136).reshape(4, 4)
    scales = raw.reshape(-1, 36)[:, :4]
    scales[scales == 255] = 127  # the largest with a sign, which no file has
    checkpoint = write_matrix(tmp_path / "model.gguf", raw, None if factor is None else [factor])
    assert set(checkpoint.tensors) == {READ_AS}
    assert checkpoint.tensors[READ_AS].stored_as == "NVFP4"
    want = torch.from_numpy(gguf.quants.dequantize(raw, Kind.NVFP4)) * (factor or 1.0)
    values, rows = checkpoint.read(READ_AS), checkpoint.read_rows(READ_AS, 3, 31)
    assert torch.equal(values, want)
    assert torch.equal(values_of("NVFP4", rows.values), values[3:31])


def test_a_factor_is_rounded_as_modelopt_does(tmp_path):
    tensors, weight = QUANTIZATIONS["modelopt nvfp4"][1](24, 256, 7)
    raw = repacked(tensors["weight"], tensors["weight_scale"])
    checkpoint = write_matrix(tmp_path / "model.gguf", raw, [tensors["weight_scale_2"].item()])
    assert torch.equal(checkpoint.read(READ_AS), weight)
    assert torch.equal(values_of("NVFP4", checkpoint.read_rows(READ_AS, 5, 20).values), weight[5:20])


@pytest.mark.parametrize(("factors", "problem"), [([1.0, 2.0], "one float32 a matrix"), ([-1.0], "above zero")])
def test_factors_that_are_none(tmp_path, factors, problem):
    with pytest.raises(CheckpointError, match=problem):
        write_matrix(tmp_path / "model.gguf", np.zeros((2, 36), np.uint8), factors).read(READ_AS)


def write_model(file, folder):
    """Write a `qwen3_moe` folder of ModelOpt's as a GGUF file."""
    stored = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(file, "qwen3moe")
    for add, value in (
        (writer.add_context_length, 128),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, WIDTH),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KV_HEADS),
        (writer.add_key_length, HEAD_DIM),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_vocab_size, VOCAB),
        (writer.add_expert_count, EXPERTS),
        (writer.add_expert_used_count, 2),
        (writer.add_expert_feed_forward_length, WIDTH),
    ):
        add(value)

    def add(name, ours):
        parts = [[stored[f"{it}.{part}"] for it in ours] for part in ("weight", "weight_scale")]
        raw = repacked(*(torch.stack([it.view(torch.uint8) for it in part]) for part in parts))
        factors = [stored[f"{it}.weight_scale_2"].item() for it in ours]
        add_nvfp4(writer, name, raw if len(ours) > 1 else raw[0], factors)

    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inside = {f"model.layers.{i}.{it}": f"blk.{i}.{own}" for i in range(LAYERS) for it, own in IN_LAYER.items()}
    for name, own in (outside | inside).items():
        if f"{name}.weight_scale" in stored:
            add(own, [name])
        else:
            add_gguf_tensor(writer, f"{own}.weight", stored[f"{name}.weight"].float())
    for i in range(LAYERS):
        for part in ("gate", "up", "down"):
            names = [f"model.layers.{i}.mlp.experts.{expert}.{part}_proj" for expert in range(EXPERTS)]
            add(f"blk.{i}.ffn_{part}_exps", names)
    finish(writer)
    return file


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_a_model_is_the_same_as_the_folder_it_was_made_of(tmp_path):
    folder = write_quantized_model(tmp_path, "qwen3_moe", "modelopt nvfp4") / "quantized"
    file = write_model(tmp_path / "model.gguf", folder)
    ours, theirs = open_checkpoint(file), open_checkpoint(folder)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.read(name), theirs.read(name).float()) for name in theirs.tensors)
    as_file, as_folder = (config_of(it, cache_dir=tmp_path, exact_activations=True) for it in (file, folder))
    assert as_file.weight_format == as_folder.weight_format == "nvfp4"
    assert run(as_file, PROMPTS) == run(as_folder, PROMPTS)
