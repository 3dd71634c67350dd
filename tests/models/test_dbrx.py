import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DbrxConfig

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.models.registry import read_model_config
from tests.models.parity import SHAPE, Parity, make_pair

OWN = {"vocab_size": 97, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}
TOKENS = {key: value for key, value in SHAPE.items() if key.endswith("_token_id")}


def config(attention=(), **ffn):
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0} | dict(attention)
    ffn = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2} | ffn
    return DbrxConfig(**OWN, **TOKENS, attn_config=attention, ffn_config=ffn)


CONFIGS = {
    "clipped, two of four": config({"clip_qkv": 0.5}),
    "weights as they are, three of five": config(
        {"clip_qkv": 50.0}, moe_num_experts=5, moe_top_k=3, moe_normalize_expert_weights=None
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("dbrx"))


class TestDbrx(Parity):
    pass


@pytest.fixture
def folder(pair, tmp_path):
    for file in Path(pair.folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_config(folder, change):
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def read_shape(folder):
    with closing(open_checkpoint(folder)) as checkpoint:
        return read_model_config(checkpoint)


def test_old_files_have_theta_among_the_settings_of_attention(folder):
    change_config(folder, lambda raw: (raw.pop("rope_parameters"), raw["attn_config"].update(rope_theta=5e5)))
    assert read_shape(folder).attention.rotary.theta == 5e5


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda raw: raw.pop("d_model"), "has no 'd_model'"),
        (lambda raw: raw["ffn_config"].pop("moe_num_experts"), "no 'moe_num_experts'"),
        (lambda raw: raw.update(attn_config=None), "'attn_config' is None"),
        (lambda raw: raw["ffn_config"].update(moe_normalize_expert_weights=2.0), "where 1 or null"),
        (lambda raw: raw["ffn_config"].update(ffn_act_fn={"name": "gelu"}), "only 'silu'"),
        (lambda raw: raw["ffn_config"].update(moe_num_experts=7), "7 experts one below the other"),
        (lambda raw: raw["attn_config"].update(clip_qkv=-1.0), "a positive number"),
        (lambda raw: raw.update(tie_word_embeddings=True), "only false"),
    ],
)
def test_configs_that_do_not_fit_are_refused(folder, change, problem):
    change_config(folder, change)
    with pytest.raises(CheckpointError, match=problem):
        read_shape(folder)


def test_projections_of_another_shape_are_refused(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["transformer.blocks.1.norm_attn_norm.attn.Wqkv.weight"] = torch.zeros(32, 32)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="queries as wide as hidden states"):
        open_checkpoint(folder)
