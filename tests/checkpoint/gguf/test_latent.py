"""GGUF files of models with latent attention, in llama.cpp's older form and in its newer one."""

import dataclasses
from types import SimpleNamespace

import gguf
import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.models.loading import outline
from moeflow.models.registry import read_model_config
from tests.checkpoint.gguf.test_routed_families import ROUTED, ROUTING, SIGMOID, write
from tests.models.parity import SHAPE, Cache, close, load, random_model, their_logits, tokens

HEADS, NOPE, ROPE, LATENT, VALUE = 4, 12, 8, 24, 10
DIMS = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 32,
}
STRETCHED = {
    "add_rope_scaling_type": gguf.RopeScalingType.YARN,
    "add_rope_scaling_factor": 4.0,
    "add_rope_scaling_orig_ctx_len": 32,
    "add_rope_scaling_yarn_log_mul": 0.1 * 0.707,
}
V2 = SHAPE | ROUTED | DIMS | {"norm_topk_prob": False, "q_lora_rank": None, "topk_method": "group_limited_greedy"}
FAMILIES = {
    "v2": (DeepseekV2Config(**V2, rope_parameters=YARN), STRETCHED | {"add_expert_weights_norm": False}),
    "v3": (DeepseekV3Config(**SHAPE | ROUTED | DIMS | {"q_lora_rank": 18}), SIGMOID | {"add_q_lora_rank": 18}),
}
COMMON = ROUTING | {"add_kv_lora_rank": LATENT, "add_rope_dimension_count": ROPE}
OLDER = {"add_head_count_kv": HEADS, "add_key_length": NOPE + ROPE, "add_value_length": VALUE}
NEWER = {
    "add_head_count_kv": 1,
    "add_key_length": LATENT + ROPE,
    "add_value_length": LATENT,
    "add_key_length_mla": NOPE + ROPE,
    "add_value_length_mla": VALUE,
}


def scored_by(function):
    """Return what sets a function that gguf's table may lack."""
    return {"add_expert_gating_func": SimpleNamespace(value=function)}


def written(tmp_path, name, *, is_newer, more=None, leaves_out=None, without=()):
    config, own = FAMILIES[name]
    random_model(config).save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    stacks = {}
    for layer in range(SHAPE["num_hidden_layers"] if is_newer else 0):
        up = folder.read(f"model.layers.{layer}.self_attn.kv_b_proj.weight").view(HEADS, NOPE + VALUE, LATENT)
        keys, values = up.split([NOPE, VALUE], dim=1)
        stacks[f"blk.{layer}.attn_k_b.weight"] = keys.transpose(1, 2).contiguous()
        stacks[f"blk.{layer}.attn_v_b.weight"] = values.contiguous()
    stacks.pop(leaves_out, None)
    settings = COMMON | (NEWER if is_newer else OLDER) | own | (more or {})
    without = [*without, *(["kv_b_proj.weight"] if is_newer else [])]
    return folder, write(tmp_path / "model.gguf", "deepseek2", folder, settings, stacks, without)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_newer", [False, True])
def test_the_file_is_the_folder(tmp_path, name, is_newer):
    folder, file = written(tmp_path, name, is_newer=is_newer)
    expected, found = read_model_config(folder), read_model_config(file)
    assert found.with_fields(eps=expected.norms.eps, unused_prefixes=()) == dataclasses.replace(
        expected, unused_prefixes=()
    )
    assert file.tensors.keys() == folder.tensors.keys()
    for tensor_name in folder.tensors:
        whole = folder.read(tensor_name)
        assert file.tensors[tensor_name].shape == whole.shape
        assert torch.equal(file.read(tensor_name), whole), tensor_name
    rows = file.read_rows("model.layers.1.self_attn.kv_b_proj.weight", 3, 30)
    assert torch.equal(rows.values, folder.read("model.layers.1.self_attn.kv_b_proj.weight")[3:30])
    assert rows.numbers.tolist() == list(range(3, 30))
    outline(file)


@pytest.mark.parametrize("function", [{}, *map(scored_by, (0, 1, 2))], ids=["none", "0", "softmax", "sigmoid"])
def test_glm_4_7_flash_is_deepseek_v3(tmp_path, function):
    """llama.cpp has no architecture of its own for it. Early conversions leave out how experts are scored."""
    latent = ROUTED | DIMS | {"q_lora_rank": 18}
    theirs = random_model(Glm4MoeLiteConfig(**SHAPE | latent, mlp_layer_types=["dense", "sparse", "sparse"]))
    theirs.save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    settings = COMMON | OLDER | function | {"add_q_lora_rank": 18}
    write(tmp_path / "model.gguf", "deepseek2", folder, settings)
    ids = tokens(30)
    close(Cache(load(tmp_path / "model.gguf")).run({"a": ids})["a"], their_logits(theirs, ids))


@pytest.mark.parametrize("function", [{}, scored_by(0), scored_by(1)], ids=["none", "0", "softmax"])
def test_softmax_with_weights_that_add_up_to_one_is_refused_with_the_reason(tmp_path, function):
    reason = r"no tensor 'exp_probs_b\.bias'.*by softmax\. 'deepseek2\.expert_weights_norm' is True"
    with pytest.raises(CheckpointError, match=reason):
        written(tmp_path, "v2", is_newer=True, more=function | {"add_expert_weights_norm": True})


def test_sigmoid_without_the_bias_names_the_missing_tensor(tmp_path):
    with pytest.raises(CheckpointError, match="e_score_correction_bias"):
        outline(written(tmp_path, "v3", is_newer=False, without=["e_score_correction_bias"])[1])


def test_other_functions_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="'expert_gating_func' is 3, which is not supported"):
        written(tmp_path, "v3", is_newer=True, more=scored_by(3))


def test_keys_without_values_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such stack of values"):
        written(tmp_path, "v3", is_newer=True, leaves_out="blk.1.attn_v_b.weight")


def test_keys_that_are_all_rotated_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="8 of them rotated"):
        written(tmp_path, "v3", is_newer=True, more={"add_key_length_mla": ROPE})
