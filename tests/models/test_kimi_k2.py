"""Kimi K2: DeepseekV3ForCausalLM under a name of its own, with the keys of code that was before transformers' class."""

import json
from contextlib import closing

import pytest
from transformers import DeepseekV3Config

from moeflow.checkpoint.open import open_checkpoint
from moeflow.models.registry import read_model_config
from tests.models.fake_checkpoint import shape_of
from tests.models.parity import Cache, Pair, close, load, random_model, their_logits, tokens
from tests.models.test_deepseek import LATENT, RANK

PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
TINY = LATENT | RANK | {"intermediate_size": 48}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with the keys that are published, and transformers' own model of the same arithmetic."""
    folder = tmp_path_factory.mktemp("kimi_k2")
    scaling = PUBLISHED["rope_scaling"] | {"original_max_position_embeddings": 16}
    kept = {key: PUBLISHED[key] for key in ("first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor")}
    rope = {"rope_type": "yarn", "rope_theta": PUBLISHED["rope_theta"]} | scaling
    del rope["type"]
    theirs = random_model(DeepseekV3Config(**TINY, **kept, rope_parameters=rope))
    theirs.save_pretrained(folder)
    config = PUBLISHED | TINY | {"rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    return Pair(theirs, load(folder), str(folder))


def test_logits_are_those_of_deepseek_v3(pair):
    ids = tokens(37)
    close(Cache(pair.ours).run({"a": ids})["a"], their_logits(pair.theirs, ids))


def test_the_folder_is_taken_for_deepseek_v3s(pair):
    with closing(open_checkpoint(pair.folder)) as checkpoint:
        assert read_model_config(checkpoint).model_type == "deepseek_v3"


def test_the_published_model_has_its_size():
    shape = shape_of(PUBLISHED)
    assert shape.num_parameters == pytest.approx(1.026e12, rel=0.002)
    assert shape.num_active_parameters == pytest.approx(32e9, rel=0.03)
    assert shape.attention.score_scale == pytest.approx(192**-0.5 * (0.1 * 3.4657359 + 1) ** 2)
