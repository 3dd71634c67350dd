"""GGUF files of Granite 4.0, as gguf's tables and llama.cpp's conversion write them."""

from __future__ import annotations

import dataclasses

import gguf
import pytest
import torch
from transformers import GraniteMoeHybridConfig

from moeflow.checkpoint.gguf.recurrent import key_heads
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.models.loading import outline
from moeflow.models.registry import read_model_config
from tests.checkpoint.tiny_models import _permute, _stacked, add_gguf_tensor, finish
from tests.models.parity import random_model
from tests.models.test_granitemoehybrid import DENSE, MAMBA

ALL_ATTEND = {"layer_types": ["full_attention"] * 3}
HYBRIDS = {
    "experts": ("granitehybrid", GraniteMoeHybridConfig(**MAMBA)),
    "experts, tied, positions, one group": (
        "granitehybrid",
        GraniteMoeHybridConfig(
            **MAMBA | {"mamba_n_groups": 1}, tie_word_embeddings=True, position_embedding_type="rope"
        ),
    ),
    "dense": ("granitehybrid", GraniteMoeHybridConfig(**DENSE | {"intermediate_size": 40})),
}
OTHERS = {
    "dense, all attend": (
        "granite",
        GraniteMoeHybridConfig(
            **DENSE | ALL_ATTEND | {"intermediate_size": 40}, position_embedding_type="rope", attention_bias=True
        ),
    ),
    "experts, all attend": ("granitemoe", GraniteMoeHybridConfig(**MAMBA | ALL_ATTEND)),
}
CASES = HYBRIDS | OTHERS


def settings_of(architecture, raw, config):
    """Return what the conversion says of a model, as setters of gguf's writer."""
    settings = {
        "add_context_length": raw["max_position_embeddings"],
        "add_embedding_length": raw["hidden_size"],
        "add_block_count": config.num_layers,
        "add_feed_forward_length": raw["intermediate_size"],
        "add_head_count": config.attention.num_heads,
        "add_head_count_kv": config.attention.num_kv_heads,
        "add_layer_norm_rms_eps": raw["rms_norm_eps"],
        "add_rope_freq_base": 10000.0,
        "add_rope_scaling_finetuned": raw["position_embedding_type"] == "rope",
        "add_vocab_size": config.vocab_size,
        "add_expert_count": raw["num_local_experts"],
        "add_expert_used_count": raw["num_experts_per_tok"],
        "add_expert_shared_feed_forward_length": raw["shared_intermediate_size"],
        "add_embedding_scale": raw["embedding_multiplier"],
        "add_residual_scale": raw["residual_multiplier"],
        "add_attention_scale": raw["attention_multiplier"],
        "add_logit_scale": raw["logits_scaling"],
    }
    if architecture == "granitehybrid":
        settings |= {
            "add_head_count_kv": [
                config.attention.num_kv_heads * (kind == "full_attention") for kind in raw["layer_types"]
            ],
            "add_ssm_conv_kernel": raw["mamba_d_conv"],
            "add_ssm_state_size": raw["mamba_d_state"],
            "add_ssm_group_count": raw["mamba_n_groups"],
            "add_ssm_inner_size": raw["mamba_expand"] * raw["hidden_size"],
            "add_ssm_time_step_rank": raw["mamba_n_heads"],
        }
    return settings


def converted(name, tensor, names, raw):
    """Return a tensor's name and contents as the conversion has them."""
    network = "mlp.shared_expert." if raw["num_local_experts"] else "mlp."
    known = name.replace("shared_mlp.", network).replace("block_sparse_moe.experts", "mlp.experts")
    gguf_name = names.get_name(known.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
    assert gguf_name is not None, name
    if "q_proj" in name or "k_proj" in name:
        tensor = _permute(tensor, raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    if name.endswith(("A_log", ".D")):
        tensor = (-tensor.exp() if name.endswith("A_log") else tensor)[:, None]
    if name.endswith("mamba.norm.weight"):
        tensor = tensor.reshape(raw["mamba_n_groups"], -1)
    return gguf_name, tensor.squeeze() if "conv1d" in name else tensor


def write(file, architecture, folder, more=None):
    raw = folder.config
    config = read_model_config(folder)
    writer = gguf.GGUFWriter(file, architecture)
    for setter, value in (settings_of(architecture, raw, config) | (more or {})).items():
        getattr(writer, setter)(value)
    number = next(item for item, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(number, config.num_layers)
    for name, tensor in _stacked({name: folder.read(name) for name in folder.tensors}).items():
        gguf_name, values = converted(name, tensor.float(), names, raw)
        add_gguf_tensor(writer, gguf_name, values)
    finish(writer)
    return open_checkpoint(file)


def folder_of(case, path):
    random_model(CASES[case][1]).save_pretrained(path)
    return open_checkpoint(path)


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_the_folder(tmp_path, case):
    folder = folder_of(case, tmp_path / "folder")
    file = write(tmp_path / "model.gguf", CASES[case][0], folder)
    expected, found = read_model_config(folder), read_model_config(file)
    for one in (expected, found):
        assert one.norms.eps == pytest.approx(expected.norms.eps)
    same_eps = {"eps": 1.0, "score_scale": 1.0, "embedding_scale": 1.0, "logit_scale": 1.0}
    mixers = [None if one.recurrent is None else one.recurrent.mixer for one in (found, expected)]
    rounded = [
        one.with_fields(
            **same_eps,
            recurrent=one.recurrent
            and dataclasses.replace(one.recurrent, mixer=dataclasses.replace(one.recurrent.mixer, norm_eps=1.0)),
        )
        for one in (found, expected)
    ]
    assert rounded[0] == rounded[1]
    scales = [
        (one.attention.score_scale, one.embeddings.embedding_scale, one.embeddings.logit_scale)
        for one in (found, expected)
    ]
    assert scales[0] == pytest.approx(scales[1])
    assert mixers[0] is None or mixers[0].norm_eps == pytest.approx(mixers[1].norm_eps)
    assert file.tensors.keys() == folder.tensors.keys()
    for name in folder.tensors:
        assert file.tensors[name].shape == folder.tensors[name].shape, name
        got, want = file.read(name), folder.read(name)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6) if name.endswith("A_log") else torch.equal(got, want)
    outline(file)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"add_head_count_kv": [0, 2]}, "head_count_kv"),
        ({"add_head_count_kv": [1, 2, 0]}, "head_count_kv"),
        ({"add_ssm_inner_size": 65}, "ssm.inner_size"),
        ({"add_ssm_time_step_rank": 7}, "ssm.inner_size"),
        ({"add_ssm_state_size": 0}, "ssm.state_size"),
        ({"add_block_count": 2**32 - 1, "add_head_count_kv": 2}, "'block_count' is 4294967295"),
    ],
)
def test_layers_that_cannot_be_are_refused(tmp_path, more, problem):
    folder = folder_of("experts", tmp_path / "folder")
    with pytest.raises(CheckpointError, match=problem):
        write(tmp_path / "model.gguf", "granitehybrid", folder, more)


@pytest.mark.parametrize("counts", [[[0], [2]], [0, [2]], [False, True], [0, -2], [0, 2.0], [0, "2"], [0, None], {}])
def test_numbers_of_key_heads_that_are_none_are_refused(counts):
    reader = ConfigReader({"attention.head_count_kv": counts, "block_count": 2}, "model.gguf")
    with pytest.raises(CheckpointError, match="head_count_kv"):
        key_heads(reader, 4, ("attention", "mamba"))


def test_other_architectures_have_alike_layers(tmp_path):
    folder = folder_of("dense, all attend", tmp_path / "folder")
    with pytest.raises(CheckpointError, match="where int is expected"):
        write(tmp_path / "model.gguf", "granite", folder, {"add_head_count_kv": [2, 0, 2]})
