"""DeepSeek's families and GLM's of their layers: latent attention with and without a rank of queries."""

import json

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.models.families import deepseek_v2, deepseek_v3, glm4_moe_lite
from tests.models.parity import SHAPE, Parity, make_pair

LATENT = SHAPE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32,
}
RANK = {"q_lora_rank": 18}
CONFIGS = {
    "v2, as Lite": DeepseekV2Config(**LATENT, first_k_dense_replace=1, rope_parameters=YARN),
    "v2, groups, a rank of queries, biased": DeepseekV2Config(
        **LATENT | RANK,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.0,
        attention_bias=True,
        n_shared_experts=1,
    ),
    "v3, as published": DeepseekV3Config(
        **LATENT | RANK, first_k_dense_replace=1, n_group=4, topk_group=2, rope_parameters=YARN
    ),
    "v3, no rank of queries, halves": DeepseekV3Config(
        **LATENT, first_k_dense_replace=2, n_group=1, topk_group=1, rope_interleave=False, norm_topk_prob=False
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(**LATENT | RANK, mlp_layer_types=["dense", "sparse", "sparse"]),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("deepseek"))


class TestDeepseek(Parity):
    pass


def read(family, config, **changes):
    raw = json.loads(config.to_json_string(use_diff=False))
    return family.read_config(ConfigReader(raw | changes, "config.json"))


@pytest.mark.parametrize(
    ("family", "name", "changes", "problem"),
    [
        (deepseek_v2, "v2, as Lite", {"norm_topk_prob": True}, "'norm_topk_prob' is True"),
        (deepseek_v2, "v2, as Lite", {"scoring_func": "sigmoid"}, "'scoring_func'"),
        (deepseek_v2, "v2, as Lite", {"topk_method": "noaux_tc"}, "'topk_method'"),
        (deepseek_v2, "v2, as Lite", {"attention_bias": True}, "without 'q_lora_rank'"),
        (deepseek_v2, "v2, as Lite", {"kv_lora_rank": 23}, "even number"),
        (deepseek_v2, "v2, as Lite", {"kv_lora_rank": None}, "has no 'kv_lora_rank'"),
        (deepseek_v3, "v3, as published", {"scoring_func": "softmax"}, "'scoring_func'"),
        (deepseek_v3, "v3, as published", {"n_group": 3}, "groups"),
        (deepseek_v3, "v3, as published", {"qk_rope_head_dim": 7}, "even number"),
        (glm4_moe_lite, "glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types'"),
    ],
)
def test_what_is_not_computed_is_refused(family, name, changes, problem):
    with pytest.raises(CheckpointError, match=problem):
        read(family, CONFIGS[name], **changes)


def test_layers_that_predict_further_tokens_are_not_part_of_the_model():
    assert read(deepseek_v3, CONFIGS["v3, as published"]).unused_prefixes == ("model.layers.3.",)
