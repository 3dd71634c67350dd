"""Configs as old and new transformers write them; each broken in every way that would change the arithmetic."""

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import RopeConfig
from tests.models.fake_checkpoint import shape_of

ARCHITECTURES = {
    LlamaConfig: "LlamaForCausalLM",
    MixtralConfig: "MixtralForCausalLM",
    OlmoeConfig: "OlmoeForCausalLM",
    Qwen3MoeConfig: "Qwen3MoeForCausalLM",
}
OTHERS = {
    DeepseekV2Config: "DeepseekV2ForCausalLM",
    DeepseekV3Config: "DeepseekV3ForCausalLM",
    Dots1Config: "Dots1ForCausalLM",
    Glm4MoeLiteConfig: "Glm4MoeLiteForCausalLM",
    GptOssConfig: "GptOssForCausalLM",
    GraniteMoeSharedConfig: "GraniteMoeSharedForCausalLM",
    Qwen3NextConfig: "Qwen3NextForCausalLM",
    Qwen3_5MoeTextConfig: "Qwen3_5MoeForCausalLM",
    Ernie4_5_MoeConfig: "Ernie4_5_MoeForCausalLM",
    Glm4MoeConfig: "Glm4MoeForCausalLM",
    HunYuanMoEV1Config: "HunYuanMoEV1ForCausalLM",
    MiniMaxM2Config: "MiniMaxM2ForCausalLM",
    Qwen2Config: "Qwen2ForCausalLM",
    Qwen2MoeConfig: "Qwen2MoeForCausalLM",
}


def raw(kind=LlamaConfig, **changes):
    """Return what transformers writes today, with changes; a value of ... takes the key away."""
    config = kind().to_dict() | {"architectures": [(ARCHITECTURES | OTHERS)[kind]]} | changes
    return {key: value for key, value in config.items() if value is not ...}


def read(kind=LlamaConfig, **changes):
    return shape_of(raw(kind, **changes))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_defaults_are_those_of_transformers(kind):
    want = kind()
    config = read(kind)
    assert config.hidden_size == want.hidden_size
    assert config.num_layers == want.num_hidden_layers
    assert config.num_heads == want.num_attention_heads
    assert config.num_kv_heads == want.num_key_value_heads
    assert config.max_position == want.max_position_embeddings
    assert config.rms_norm_eps == want.rms_norm_eps
    assert config.rope == RopeConfig(theta=want.rope_parameters["rope_theta"])
    assert config.num_experts == getattr(want, "num_experts", 0)
    assert config.top_k == getattr(want, "num_experts_per_tok", 0)
    assert config.sliding_window is None


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_without_any_rotary_key_the_familys_own_base_holds(kind):
    assert read(kind, rope_parameters=...).rope.theta == kind().rope_parameters["rope_theta"]


@pytest.mark.parametrize("kind", [MixtralConfig, OlmoeConfig, Qwen3MoeConfig])
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts_are_read(kind, key):
    config = raw(kind, num_experts=..., num_local_experts=...) | {key: 24}
    assert shape_of(config).num_experts == 24


def test_old_rotary_keys_mean_what_the_new_ones_mean():
    llama3 = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    old = read(rope_parameters=..., rope_theta=500000, rope_scaling=llama3)
    new = read(rope_parameters=llama3 | {"rope_theta": 500000.0})
    assert old.rope == new.rope
    assert old.rope == RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    oldest = read(rope_parameters=..., rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0})
    assert oldest.rope == RopeConfig(kind="linear", factor=4.0)
    assert read(rope_parameters=..., rope_theta=1e5, rope_scaling=None).rope == RopeConfig(theta=1e5)


def test_yarn():
    yarn = {"rope_type": "yarn", "factor": 4, "rope_theta": 1e6}
    assert read(rope_parameters=yarn, max_position_embeddings=4096).rope == RopeConfig(
        1e6, "yarn", 4.0, original_max_position=4096
    )
    stated = yarn | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 64}
    rope = read(rope_parameters=stated).rope
    assert rope.truncate
    assert not read(rope_parameters=stated | {"truncate": False}).rope.truncate
    assert (rope.attention_factor, rope.beta_fast, rope.beta_slow, rope.original_max_position) == (1.5, 16, 2, 64)


def test_dense_layers_of_qwen3():
    assert read(Qwen3MoeConfig, num_hidden_layers=6, mlp_only_layers=[1, 9]).dense_layers == (1,)
    assert read(Qwen3MoeConfig, num_hidden_layers=6, decoder_sparse_step=3).dense_layers == (0, 1, 3, 4)
    assert read(Qwen3MoeConfig, num_hidden_layers=2, mlp_only_layers=None).dense_layers == ()


def test_a_window_counts_only_where_the_family_uses_it():
    assert read(MixtralConfig, sliding_window=512).sliding_window == 512
    assert read(Qwen3MoeConfig, sliding_window=512, use_sliding_window=False).sliding_window is None
    assert read(Qwen3MoeConfig, sliding_window=512, use_sliding_window=True).sliding_window == 512


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        (LlamaConfig, {"hidden_size": ...}, "has no 'hidden_size'"),
        (LlamaConfig, {"hidden_size": "4096"}, "'hidden_size' is '4096'"),
        (LlamaConfig, {"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        (LlamaConfig, {"rms_norm_eps": ...}, "has no 'rms_norm_eps'"),
        (LlamaConfig, {"num_key_value_heads": 5}, "no multiple"),
        (LlamaConfig, {"head_dim": 7}, "even number"),
        (LlamaConfig, {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        (LlamaConfig, {"rope_parameters": "yarn"}, "an object is expected"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "longrope"}}, "'longrope'; supported are default"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "linear"}}, "has no 'factor'"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "'factor' is 0.0"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "has no 'low_freq_factor'"),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "less than 'high_freq_factor'",
        ),
        (LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "beta_slow": 0}}, "'beta_slow' is 0.0"),
        (LlamaConfig, {"rope_parameters": {"rope_theta": 1.0}}, "'rope_theta' is 1.0"),
        (LlamaConfig, {"partial_rotary_factor": 0.5}, "positions rotate 64 of a head's 128"),
        (LlamaConfig, {"partial_rotary_factor": 1e308}, "'partial_rotary_factor' is 1e+308, where at most 1"),
        (LlamaConfig, {"partial_rotary_factor": -0.5}, "'partial_rotary_factor' is -0.5, where at least 0"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 0}}, "'truncate' is 0"),
        (MixtralConfig, {"num_local_experts": ...}, "has no 'num_experts'"),
        (MixtralConfig, {"num_experts_per_tok": 9}, "9, of 8 experts"),
        (MixtralConfig, {"sliding_window": 0}, "'sliding_window' is 0"),
        (OlmoeConfig, {"clip_qkv": 0.0}, "'clip_qkv' is 0.0"),
        (Qwen3MoeConfig, {"mlp_only_layers": [1.5]}, "'mlp_only_layers'"),
        (Qwen2MoeConfig, {"shared_expert_intermediate_size": 0}, "'shared_expert_intermediate_size' is 0"),
        (Qwen2Config, {"use_sliding_window": True, "layer_types": ["full_attention"]}, "'layer_types'"),
        (Glm4MoeConfig, {"n_group": 3, "head_dim": 128}, "128 experts are not in 3 groups"),
        (Glm4MoeConfig, {"n_group": 64, "topk_group": 2, "head_dim": 128}, "8 of 4 experts cannot be chosen"),
        (Glm4MoeConfig, {"n_shared_experts": -1, "head_dim": 128}, "'n_shared_experts' is -1"),
        (Glm4MoeConfig, {"scoring_func": "softmax", "head_dim": 128}, "'scoring_func' is 'softmax'"),
        (Ernie4_5_MoeConfig, {"head_dim": 2050}, "2050 dimensions, at most 2048 are supported"),
        (Ernie4_5_MoeConfig, {"use_bias": True}, "'use_bias' is true"),
        (Ernie4_5_MoeConfig, {"moe_layer_interval": 0}, "'moe_layer_interval' is 0"),
        (HunYuanMoEV1Config, {"moe_topk": [1, 2]}, "all layers have to be alike"),
        (HunYuanMoEV1Config, {"num_shared_expert": [2, 2]}, "'num_shared_expert' is [2, 2], where 1"),
        (HunYuanMoEV1Config, {"use_cla": True}, "'use_cla' is True"),
        (HunYuanMoEV1Config, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (MiniMaxM2Config, {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        (MiniMaxM2Config, {"use_qk_norm": False}, "'use_qk_norm' is False"),
        (MiniMaxM2Config, {"use_routing_bias": False}, "'use_routing_bias' is False"),
        (MiniMaxM2Config, {"shared_intermediate_size": 64}, "'shared_intermediate_size' is 64"),
        (MiniMaxM2Config, {"rotary_dim": 63}, "an even part is expected"),
        (Qwen3MoeConfig, {"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0"),
    ],
)
def test_what_cannot_be_computed_is_refused(kind, changes, complaint):
    with pytest.raises(CheckpointError) as error:
        read(kind, **changes)
    assert complaint in str(error.value)
    assert error.value.file == "/models/fake/config.json"


EXPERTS = {"n_routed_experts": 64, "num_experts_per_tok": 6}
ROUTED = {
    "routed_scaling_factor": "routed_scaling_factor",
    "n_group": "num_expert_groups",
    "topk_group": "num_chosen_groups",
    "n_shared_experts": "shared_intermediate_size",
    "first_k_dense_replace": "dense_layers",
}


@pytest.mark.parametrize("kind", [DeepseekV2Config, DeepseekV3Config, Dots1Config, Glm4MoeConfig, Glm4MoeLiteConfig])
@pytest.mark.parametrize("key", ROUTED)
def test_without_a_key_of_routing_the_familys_own_default_holds(kind, key):
    own = EXPERTS | ({"head_dim": 128} if kind is Glm4MoeConfig else {})
    without, stated = read(kind, **own, **{key: ...}), read(kind, **own, **{key: getattr(kind(), key, None)})
    assert getattr(without, ROUTED[key]) == getattr(stated, ROUTED[key])


def test_null_groups_are_none():
    shape = read(DeepseekV3Config, n_group=None, topk_group=None)
    assert (shape.num_expert_groups, shape.num_chosen_groups) == (1, 1)


@pytest.mark.parametrize("kind", [GptOssConfig, Qwen3NextConfig, Qwen3_5MoeTextConfig])
def test_without_its_key_a_head_is_as_long_as_the_familys(kind):
    assert read(kind, head_dim=...).head_dim == kind().head_dim


def test_keys_in_place_of_which_a_family_has_others_are_not_read():
    assert read(DeepseekV3Config, head_dim=7).head_dim == 512 + 64


def test_without_its_size_granite_has_no_shared_expert():
    assert read(GraniteMoeSharedConfig, num_local_experts=8, shared_intermediate_size=...).shared_intermediate_size == 0


@pytest.mark.parametrize(("stated", "expected"), [({}, 4096), ({"sliding_window": None}, None)])
def test_layers_of_dots1_slide_unless_the_window_is_null(stated, expected):
    kinds = ["full_attention", "sliding_attention"]
    changes = EXPERTS | {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": ...} | stated
    shape = read(Dots1Config, **changes)
    assert [kind.sliding_window for kind in shape.attention_kinds] == ([None, expected] if expected else [])
