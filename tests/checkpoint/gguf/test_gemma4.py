"""GGUF files of Gemma 4, as gguf's tables and llama.cpp's conversion write them."""

from __future__ import annotations

import dataclasses
import re

import gguf
import pytest
import torch

from moeflow.checkpoint.gguf.rope import turning_share
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.models.families.gemma4_text import _read_rope
from moeflow.models.loading import outline
from moeflow.models.registry import read_model_config
from tests.checkpoint.tiny_models import add_gguf_tensor, finish
from tests.models.parity import random_model
from tests.models.test_gemma4_text import CONFIGS

ROPE = {"rope_type": "proportional", "rope_theta": 1e6}
PHONE = {
    "add_block_count": 6,
    "add_sliding_window_pattern": [True, True, False] * 2,
    "add_embedding_length_per_layer_input": 20,
}
CASES = {
    "as published": {"add_head_count_kv": [2, 2, 1]},
    "values of their own, biased, capped logits, untied": {
        "add_head_count_kv": 2,
        "add_final_logit_softcapping": 2.0,
        "add_rope_freq_base": 3e4,
        "add_rope_freq_base_swa": 300.0,
    },
    "dense": {"add_head_count_kv": [2, 2, 1]},
    "for phones": PHONE
    | {"add_head_count_kv": 2, "add_shared_kv_layers": 2, "add_feed_forward_length": [48] * 4 + [96] * 2},
    "layers share keys that are values": PHONE | {"add_head_count_kv": [2, 2, 1] * 2, "add_shared_kv_layers": 3},
    "tokens are embedded for each layer": {
        "add_head_count_kv": 2,
        "add_embedding_length_per_layer_input": 20,
        "add_final_logit_softcapping": 3.0,
    },
}
EXPERTS = {"add_expert_count": 8, "add_expert_used_count": 3, "add_expert_feed_forward_length": 24}
COMMON = {
    "add_context_length": 128,
    "add_embedding_length": 32,
    "add_block_count": 3,
    "add_feed_forward_length": 48,
    "add_head_count": 4,
    "add_key_length": 24,
    "add_value_length": 24,
    "add_key_length_swa": 12,
    "add_value_length_swa": 12,
    "add_rope_dimension_count": 24,
    "add_rope_dimension_count_swa": 12,
    "add_layer_norm_rms_eps": 1e-6,
    "add_rope_freq_base": 1e6,
    "add_rope_freq_base_swa": 1e4,
    "add_sliding_window": 9,
    "add_sliding_window_pattern": [True, True, False],
    "add_shared_kv_layers": 0,
    "add_embedding_length_per_layer_input": 0,
    "add_vocab_size": 97,
}


def tensors_of(model):
    """Yield tensors' names and contents as the conversion has them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        block = ".".join(name.split(".")[:3]).replace("model.layers", "blk")
        if name.endswith("router.scale"):
            yield f"{block}.ffn_gate_inp.scale", tensor
        elif name.endswith("per_expert_scale"):
            yield f"{block}.ffn_down_exps.scale", tensor
        else:
            known = name + ".weight" if re.search(r"layer_scalar|experts\.", name) else name
            gguf_name = names.get_name(known, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None, name
            yield gguf_name, tensor


def write(tmp_path, case, more=None, table=None, without=()):
    config = CONFIGS[case]
    model = random_model(config)
    model.save_pretrained(tmp_path / "folder")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma4")
    experts = EXPERTS if config.enable_moe_block else {}
    for setter, value in (COMMON | experts | CASES[case] | (more or {})).items():
        getattr(writer, setter)(value)
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    num_turning = int(24 * share / 2)
    factors = [1.0] * num_turning + [1e30] * (12 - num_turning) if table is None else table
    add_gguf_tensor(writer, "rope_freqs.weight", torch.tensor(factors))
    for name, tensor in tensors_of(model):
        if name not in without:
            add_gguf_tensor(writer, name, tensor.detach())
    finish(writer)
    return open_checkpoint(tmp_path / "folder"), open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_the_folder(tmp_path, case):
    folder, file = write(tmp_path, case)
    expected, found = read_model_config(folder), read_model_config(file)
    assert found.norms.eps == pytest.approx(expected.norms.eps)
    no_factor = [dataclasses.replace(rope, factor=1.0) for rope in expected.attention.ropes]
    assert list(found.attention.ropes) == no_factor
    kinds = tuple(
        dataclasses.replace(kind, rope=dataclasses.replace(kind.rope, factor=1.0))
        for kind in expected.attention.layer_kinds
    )
    expected = expected.with_fields(eps=found.norms.eps, layer_kinds=kinds)
    assert found == expected
    assert file.tensors.keys() == folder.tensors.keys()
    for name in folder.tensors:
        assert file.tensors[name].shape == folder.tensors[name].shape, name
        assert torch.equal(file.read(name), folder.read(name)), name
    outline(file)


def test_rows_of_stacked_experts_are_those_of_the_folder(tmp_path):
    folder, file = write(tmp_path, "as published")
    for part, rows in (("gate_proj", 24), ("up_proj", 24), ("down_proj", 32)):
        name = f"model.layers.1.moe.experts.5.{part}.weight"
        assert torch.equal(file.read_rows(name, 3, rows - 1).values, folder.read(name)[3 : rows - 1])


@pytest.mark.parametrize(
    ("more", "table", "problem"),
    [
        ({"add_shared_kv_layers": 1}, None, "'num_kv_shared_layers' is 1"),
        ({"add_embedding_length_per_layer_input": 8}, None, "'hidden_size_per_layer_input' is 8"),
        ({"add_feed_forward_length": [48, 48]}, None, "feed_forward_length.*3 values of int"),
        ({"add_feed_forward_length": [0, 48, 48]}, None, "'feed_forward_length' is 0"),
        ({"add_sliding_window_pattern": [True, False]}, None, "sliding_window_pattern.*3 values of bool"),
        ({"add_head_count_kv": [2, 1]}, None, "head_count_kv.*3 values of int"),
        ({"add_rope_dimension_count": 12}, None, r"rope\.dimension_count' is 12, a head has 24 dimensions"),
        ({"add_rope_scaling_factor": 2.0}, None, "positions are stretched"),
        ({}, [1.0, 2.0] * 6, "not Gemma 4's"),
        ({}, [1e30] * 6 + [1.0] * 6, "not Gemma 4's"),
        ({}, [1.0] * 3 + [1e30] * 8, r"shape \[11\], where \[12\] is expected"),
        ({}, [[1.0] * 12], r"shape \[1, 12\], where \[12\] is expected"),
        ({"add_key_length": 1, "add_value_length": 1, "add_rope_dimension_count": 1}, None, r"where \[0\] is expected"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, more, table, problem):
    with pytest.raises(CheckpointError, match=problem):
        outline(write(tmp_path, "as published", more, table)[1])


@pytest.mark.parametrize("num_pairs", [1, 3, 12, 49, 64, 107, 128, 256])
def test_as_many_pairs_turn_as_the_table_says(num_pairs):
    for num_turning in range(num_pairs + 1):
        factors = [1.0] * num_turning + [1e30] * (num_pairs - num_turning)
        share = turning_share(factors, ConfigReader({}, "model.gguf"))
        rope = _read_rope(
            ConfigReader(
                {"rope_parameters": {"full_attention": ROPE | {"partial_rotary_factor": share}}}, "model.gguf"
            ),
            "full_attention",
            2 * num_pairs,
        )
        assert rope.turning_dim == 2 * num_turning
