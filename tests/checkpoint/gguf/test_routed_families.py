"""GGUF files of families with shared experts or routing of their own. Files written by gguf's tables and llama.cpp's
conversion equal the Hugging Face folders that transformers writes.
"""

from __future__ import annotations

import gguf
import pytest
import torch
from transformers import (
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    HunYuanMoEV1Config,
    MiniMaxM2Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.models.loading import outline
from moeflow.models.registry import read_model_config
from tests.checkpoint.tiny_models import _stacked, add_gguf_tensor, finish
from tests.models.parity import SHAPE, random_model

WIDTH, EXPERTS, TOP_K = 24, 8, 3
ROUTED = {
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "num_experts_per_tok": TOP_K,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
SIGMOID = {"add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}
EXPERT_COUNTS = {"add_expert_count": EXPERTS, "add_expert_used_count": TOP_K, "add_expert_feed_forward_length": WIDTH}
ROUTING = EXPERT_COUNTS | {
    "add_expert_shared_count": 2,
    "add_leading_dense_block_count": 1,
    "add_expert_group_count": 4,
    "add_expert_group_used_count": 2,
    "add_expert_weights_norm": True,
    "add_expert_weights_scale": 2.5,
}
FAMILIES = {  # architecture: transformers' config, and what llama.cpp's conversion says of it besides
    "qwen2": (Qwen2Config(**SHAPE), {}),
    "qwen3": (Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True), {}),
    "qwen2moe": (
        Qwen2MoeConfig(
            **SHAPE,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            moe_intermediate_size=WIDTH,
            shared_expert_intermediate_size=40,
        ),
        EXPERT_COUNTS | {"add_expert_shared_feed_forward_length": 40},
    ),
    "glm4moe": (
        Glm4MoeConfig(**SHAPE, **ROUTED, head_dim=16, use_qk_norm=True, attention_bias=True),
        ROUTING | SIGMOID | {"add_rope_dimension_count": 8, "add_block_count": 4, "add_nextn_predict_layers": 1},
    ),
    "dots1": (Dots1Config(**SHAPE, **ROUTED, sliding_window=None), ROUTING | SIGMOID),
    "ernie4_5-moe": (
        Ernie4_5_MoeConfig(**SHAPE, moe_num_experts=EXPERTS, moe_k=TOP_K, moe_intermediate_size=WIDTH),
        EXPERT_COUNTS
        | {"add_expert_shared_count": 2, "add_leading_dense_block_count": 1, "add_interleave_moe_layer_step": 1},
    ),
    "minimax-m2": (
        MiniMaxM2Config(**SHAPE, head_dim=16, rotary_dim=8, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K),
        EXPERT_COUNTS
        | {"add_expert_feed_forward_length": SHAPE["intermediate_size"]}
        | SIGMOID
        | {"add_rope_dimension_count": 8},
    ),
    "hunyuan-moe": (
        HunYuanMoEV1Config(**SHAPE, num_experts=EXPERTS, moe_topk=TOP_K, head_dim=8),
        EXPERT_COUNTS
        | {"add_expert_feed_forward_length": SHAPE["intermediate_size"]}
        | {"add_expert_shared_feed_forward_length": SHAPE["intermediate_size"], "add_expert_shared_count": 1},
    ),
}


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0],
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    "original_max_position_embeddings": 32,
}
STRETCHED = {"add_rope_scaling_orig_ctx_len": 32, "add_rope_scaling_attn_factors": 1.25}
PHIMOE = EXPERT_COUNTS | {"add_expert_used_count": 2, "add_sliding_window": 0}
TABLES = {f"rope_factors_{it}.weight": torch.tensor(LONG[f"{it}_factor"]) for it in ("long", "short")}


def write(file, name, folder, more, further=None, without=()):
    """Write a checkpoint as a GGUF file, as llama.cpp's conversion does."""
    config, raw = read_model_config(folder), folder.config
    writer = gguf.GGUFWriter(file, name)
    common = {
        "add_context_length": config.max_position,
        "add_embedding_length": config.hidden_size,
        "add_block_count": config.num_layers,
        "add_feed_forward_length": raw["intermediate_size"],
        "add_head_count": config.attention.num_heads,
        "add_head_count_kv": config.attention.num_kv_heads,
        "add_key_length": config.attention.head_dim,
        "add_value_length": config.attention.head_dim,
        "add_layer_norm_rms_eps": config.norms.eps,
        "add_rope_freq_base": config.attention.rope.theta,
        "add_vocab_size": config.vocab_size,
    }
    for setter, value in (common | more).items():
        getattr(writer, setter)(value)
    architecture = next(item for item, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    kept = [name for name in folder.tensors if not name.endswith(tuple(without) or "no name")]
    for tensor_name, tensor in _stacked({name: folder.read(name) for name in kept}).items():
        renamed = tensor_name.replace("e_score_correction_bias", "e_score_correction.bias")
        gguf_name = names.get_name(renamed, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, tensor_name
        add_gguf_tensor(writer, gguf_name, tensor.float().squeeze())
    for gguf_name, tensor in (further or {}).items():
        add_gguf_tensor(writer, gguf_name, tensor)
    finish(writer)
    return open_checkpoint(file)


@pytest.mark.parametrize(
    ("more", "further", "config"),
    [
        (STRETCHED, TABLES, {"rope_parameters": LONG}),
        (STRETCHED | {"add_context_length": 32}, TABLES, {"rope_parameters": LONG, "max_position_embeddings": 32}),
        ({"add_sliding_window": 9}, None, {"sliding_window": 9}),
    ],
)
def test_phimoe(tmp_path, more, further, config):
    """Whose tables of rotary factors are tensors of their own."""
    shared = {key: SHAPE[key] for key in SHAPE if key not in config}
    given = PhimoeConfig(**shared, num_local_experts=EXPERTS, attention_bias=True, lm_head_bias=True, **config)
    random_model(given).save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    file = write(tmp_path / "model.gguf", "phimoe", folder, PHIMOE | more, further)
    expected, found = read_model_config(folder), read_model_config(file)
    assert found.with_fields(eps=expected.norms.eps) == expected
    assert file.tensors.keys() == folder.tensors.keys()
    for tensor_name in folder.tensors:
        assert torch.equal(file.read(tensor_name), folder.read(tensor_name)), tensor_name
    outline(file)


def test_scales_of_positions_without_their_tables_are_refused(tmp_path):
    random_model(PhimoeConfig(**SHAPE, num_local_experts=EXPERTS)).save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.attn_factor"):
        write(tmp_path / "model.gguf", "phimoe", folder, PHIMOE | STRETCHED)
    one = {name: table for name, table in TABLES.items() if "long" in name}
    with pytest.raises(CheckpointError, match="rope_factors_short"):
        write(tmp_path / "model.gguf", "phimoe", folder, PHIMOE | STRETCHED, one)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_file_is_the_folder(tmp_path, name):
    config, more = FAMILIES[name]
    random_model(config).save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    file = write(tmp_path / "model.gguf", name, folder, more)
    expected = read_model_config(folder)
    found = read_model_config(file)
    assert found.norms.eps == pytest.approx(expected.norms.eps)
    assert found.with_fields(eps=expected.norms.eps) == expected
    assert file.tensors.keys() == folder.tensors.keys()
    for tensor_name in folder.tensors:
        assert torch.equal(file.read(tensor_name), folder.read(tensor_name)), tensor_name
    outline(file)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    config, more = FAMILIES["glm4moe"]
    random_model(config).save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    further = {"blk.3.nextn.eh_proj.weight": torch.ones(32, 64), "blk.3.attn_norm.weight": torch.ones(32)}
    file = write(tmp_path / "model.gguf", "glm4moe", folder, more, further)
    assert len(file.tensors) == len(folder.tensors) + 2
    assert outline(file).config.num_layers == 3


@pytest.mark.parametrize(
    ("name", "key", "value"), [("glm4moe", "expert_gating_func", 1), ("qwen2moe", "expert_gating_func", 2)]
)
def test_experts_that_are_scored_otherwise_are_refused(tmp_path, name, key, value):
    config, more = FAMILIES[name]
    random_model(config).save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    with pytest.raises(CheckpointError, match=key):
        write(tmp_path / "model.gguf", name, folder, more | {f"add_{key}": gguf.ExpertGatingFuncType(value)})
