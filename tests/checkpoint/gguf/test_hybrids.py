"""GGUF files of LFM2, DBRX and Qwen3-Next, as gguf's tables and llama.cpp's conversion write them."""

from __future__ import annotations

import gguf
import pytest
import torch
from transformers import Lfm2Config, Lfm2MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.models.loading import outline
from moeflow.models.registry import read_model_config
from tests.checkpoint.tiny_models import _stacked, add_gguf_tensor, finish
from tests.models import test_dbrx, test_qwen3_next
from tests.models.parity import SHAPE, Cache, close, load, random_model, their_logits, tokens

CONV = {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5}
LINEAR = test_qwen3_next.MOE | {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
EXPERTS = {"add_expert_count": 8, "add_expert_used_count": 3, "add_expert_feed_forward_length": 24}
DELTA = EXPERTS | {
    "add_expert_shared_feed_forward_length": 40,
    "add_ssm_conv_kernel": 4,
    "add_ssm_state_size": 12,
    "add_ssm_group_count": 2,
    "add_ssm_time_step_rank": 4,
    "add_ssm_inner_size": 80,
    "add_full_attention_interval": 4,
    "add_rope_dimension_count": 4,
}
CASES = {
    "lfm2": (
        Lfm2Config(**SHAPE | CONV, block_auto_adjust_ff_dim=False, conv_bias=False),
        {"add_head_count_kv": [0, 2, 0], "add_shortconv_l_cache": 3},
    ),
    "lfm2moe": (
        Lfm2MoeConfig(
            **SHAPE | CONV, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, num_dense_layers=1
        ),
        EXPERTS
        | {
            "add_head_count_kv": [0, 2, 0],
            "add_shortconv_l_cache": 3,
            "add_leading_dense_block_count": 1,
            "add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
        },
    ),
    "dbrx": (
        test_dbrx.config({"clip_qkv": 0.5}, moe_num_experts=8, moe_top_k=3),
        {"add_expert_count": 8, "add_expert_used_count": 3, "add_clamp_kqv": 0.5, "add_layer_norm_eps": 1e-5},
    ),
    "qwen3next": (Qwen3NextConfig(**LINEAR), DELTA),
    "qwen35moe": (
        Qwen3_5MoeTextConfig(**LINEAR),
        DELTA | {"add_block_count": 5, "add_nextn_predict_layers": 1, "add_rope_dimension_sections": [1, 1, 0, 0]},
    ),
    "qwen35": (
        Qwen3_5TextConfig(**{key: value for key, value in LINEAR.items() if "expert" not in key and "moe" not in key}),
        {key: value for key, value in DELTA.items() if "expert" not in key},
    ),
}
OLD = "older qwen3next"  # with what belongs to a key head side by side


def converted(kind, name, tensor, names):
    """Yield tensors' names and contents as the conversion has them, of what the folder is seen with."""
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if "conv1d" in name or "conv.conv" in name:
        tensor = tensor.squeeze(1)
    if kind == "qwen3next" and "in_proj_qkvz" in name:
        blk = f"blk.{name.split('.')[2]}"
        parts = torch.split(tensor.view(2, -1, tensor.shape[1]), [12, 12, 40, 40], dim=1)
        queries, keys, values, gates = (part.flatten(0, 1) for part in parts)
        yield f"{blk}.attn_qkv.weight", torch.cat([queries, keys, values])
        yield f"{blk}.attn_gate.weight", gates
        return
    if kind.startswith("qwen35") and "linear_attn" in name:
        tensor = by_turns(name, tensor)
    known = name.replace(".dt_bias", ".dt_proj.bias").replace("expert_bias", "expert_bias.bias")
    if "feed_forward.experts" in name:  # as the conversion calls stacks
        known = known.removeprefix("model.")
    gguf_name = names.get_name(known, try_suffixes=(".weight", ".bias"))
    assert gguf_name is not None, name
    yield gguf_name, tensor.squeeze(0) if "shared_expert_gate" in name else tensor


def by_turns(name, tensor):
    """Reorder values as the conversion does: 4 heads that alternate, so that neighbours share a key."""
    part = name.split(".linear_attn.")[1]
    if part.startswith("out_proj"):
        return tensor.unflatten(1, (2, 2, 20)).transpose(1, 2).flatten(1)
    if part.startswith(("in_proj_qkv", "conv1d")):
        keys, values = tensor.split([48, 80])
        return torch.cat([keys, values.unflatten(0, (2, 2, 20)).transpose(0, 1).flatten(0, 2)])
    if part.startswith("in_proj_z"):
        return tensor.unflatten(0, (2, 2, 20)).transpose(0, 1).flatten(0, 2)
    if part.startswith(("in_proj_a", "in_proj_b", "A_log", "dt_bias")):
        return tensor.unflatten(0, (2, 2)).transpose(0, 1).flatten(0, 1)
    return tensor


DBRX_NAMES = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def dbrx_tensors(folder):
    """DBRX' conversion goes by names of its own, which the folder is not seen with: written out."""
    tensors = _stacked({name: folder.read(name) for name in folder.tensors})
    for name, tensor in tensors.items():
        if ".layers." not in name:
            ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            yield f"{ends[name.removesuffix('.weight')]}.weight", tensor
            continue
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        if part.endswith(("k_proj", "v_proj")) and "self_attn" in part:
            continue
        if part == "self_attn.q_proj":
            prefix = f"model.layers.{layer}.self_attn"
            tensor = torch.cat([folder.read(f"{prefix}.{it}_proj.weight") for it in "qkv"])
            part = "self_attn.qkv_proj"
        yield f"blk.{layer}.{DBRX_NAMES[part]}.weight", tensor


def all_tensors(kind, folder, config):
    architecture = kind.split()[-1]
    if architecture == "dbrx":
        yield from dbrx_tensors(folder)
        return
    number = next(item for item, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(number, config.num_layers)
    for name, tensor in _stacked({name: folder.read(name) for name in folder.tensors}).items():
        yield from converted(kind, name, tensor.float(), names)
    if architecture == "qwen35moe":  # what predicts further tokens is a layer behind the last one
        yield "blk.4.nextn.eh_proj.weight", torch.ones(32, 64)
        yield "blk.4.attn_norm.weight", torch.ones(32)


def write(file, kind, folder, more):
    architecture = kind.split()[-1]
    config = read_model_config(folder)
    raw = folder.config
    writer = gguf.GGUFWriter(file, architecture)
    common = {
        "add_context_length": config.max_position,
        "add_embedding_length": config.hidden_size,
        "add_block_count": config.num_layers,
        "add_feed_forward_length": raw.get("intermediate_size") or config.feed_forward.intermediate_size,
        "add_head_count": config.attention.num_heads,
        "add_head_count_kv": config.attention.num_kv_heads,
        "add_key_length": config.attention.head_dim,
        "add_value_length": config.attention.head_dim,
        "add_rope_freq_base": config.attention.rope.theta,
        "add_vocab_size": config.vocab_size,
    }
    if "add_layer_norm_eps" not in more:
        common["add_layer_norm_rms_eps"] = config.norms.eps
    for setter, value in (common | more).items():
        getattr(writer, setter)(value)
    for name, tensor in all_tensors(kind, folder, config):
        add_gguf_tensor(writer, name, tensor.float())
    finish(writer)
    return open_checkpoint(file)


def folder_of(kind, path):
    theirs = random_model(CASES[kind.split()[-1]][0])
    theirs.save_pretrained(path)
    return theirs, open_checkpoint(path)


def exact_logits(theirs, ids):
    """Return them without transformers' own rounding where it can do without: its experts take no float64."""
    if hasattr(theirs.config, "num_experts"):
        return their_logits(theirs, ids)
    return their_logits(theirs.double(), ids).float()


@pytest.mark.parametrize("kind", [*CASES, OLD])
def test_the_file_gives_the_same_logits(tmp_path, kind):
    theirs, folder = folder_of(kind, tmp_path / "folder")
    file = write(tmp_path / "model.gguf", kind, folder, CASES[kind.split()[-1]][1])
    outline(file)
    ids = tokens(30)
    close(Cache(load(tmp_path / "model.gguf")).run({"a": ids})["a"], exact_logits(theirs, ids))


@pytest.mark.parametrize("kind", ["lfm2", "lfm2moe", "dbrx"])
def test_the_file_is_the_folder(tmp_path, kind):
    _, folder = folder_of(kind, tmp_path / "folder")
    file = write(tmp_path / "model.gguf", kind, folder, CASES[kind][1])
    expected, found = read_model_config(folder), read_model_config(file)
    assert found.norms.eps == pytest.approx(expected.norms.eps)
    assert found.with_fields(eps=expected.norms.eps) == expected
    assert file.tensors.keys() == folder.tensors.keys()
    for name in folder.tensors:
        assert file.tensors[name].shape == folder.tensors[name].shape, name
        assert torch.equal(file.read(name), folder.read(name)), name


@pytest.mark.parametrize(
    ("kind", "more", "problem"),
    [
        ("lfm2", {"add_head_count_kv": [0, 2]}, "head_count_kv"),
        ("lfm2", {"add_shortconv_l_cache": 0}, "shortconv.l_cache"),
        ("lfm2moe", {"add_expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX}, "expert_gating_func"),
        ("dbrx", {"add_layer_norm_eps": 1e-6}, "norms with an epsilon of"),
        ("dbrx", {"add_head_count_kv": 1}, "rows, where 32 of self_attn.q_proj and 8 of self_attn.k_proj"),
        ("qwen3next", {"add_ssm_time_step_rank": 0}, "ssm.time_step_rank"),
        (OLD, {"add_ssm_group_count": 1}, "is no part|rows, where"),
        (
            OLD,
            {"add_ssm_group_count": 2**31, "add_ssm_time_step_rank": 2**31, "add_ssm_inner_size": 2**31},
            "rows, where .* of each of 2147483648 key heads are expected",
        ),
        ("lfm2", {"add_block_count": 2**32 - 1, "add_head_count_kv": 2}, "'block_count' is 4294967295"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, kind, more, problem):
    _, folder = folder_of(kind, tmp_path / "folder")
    with pytest.raises(CheckpointError, match=problem):
        outline(write(tmp_path / "model.gguf", kind, folder, CASES[kind.split()[-1]][1] | more))
