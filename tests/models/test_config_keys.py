"""Whatever a config says: transformers' logits, or a clear refusal, never others in silence.

Varies the keys that change the arithmetic one by one, in every family whose config class has them. Skips the cases that
transformers itself cannot run.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from transformers import CONFIG_MAPPING

from moeflow.core.errors import CheckpointError
from tests.models.parity import SHAPE, Cache, load, random_model, their_logits, tokens

BASE = SHAPE | {"num_hidden_layers": 2, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
LOCAL_AND_GLOBAL = {"head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
FAMILIES = {
    "llama": {},
    "mixtral": LOCAL,
    "olmoe": EXPERTS,
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "gpt_oss": LOCAL | {"head_dim": 8},
    "glm4_moe": ROUTED | {"head_dim": 8},
    "dots1": ROUTED | {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "minimax_m2": LOCAL | {"head_dim": 8},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "deepseek_v2": ROUTED | LATENT | {"topk_method": "greedy"},
    "deepseek_v3": ROUTED | LATENT,
    "glm4_moe_lite": ROUTED | LATENT,
    "granitemoe": LOCAL,
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 24},
    "granitemoehybrid": LOCAL | MAMBA | {"shared_intermediate_size": 24},
    "gemma3_text": LOCAL_AND_GLOBAL,
    "gemma4_text": LOCAL_AND_GLOBAL | {"global_head_dim": 16, "hidden_size_per_layer_input": 0},
    "phimoe": LOCAL,
    "lfm2_moe": EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": EXPERTS | DELTA_NETS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA_NETS,
}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": STRETCHED,
    "yarn, all said": STRETCHED | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False},
    "yarn, scales": STRETCHED | {"mscale": 0.7, "mscale_all_dim": 0.9},
    "llama3": STRETCHED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": STRETCHED | {"short_factor": 1.0, "long_factor": 2.0},
    "default": {},
    "default, partial": {"partial_rotary_factor": 0.5},
    "linear, partial": {"factor": 3.0, "partial_rotary_factor": 0.5},
}
VALUES = {
    "attention_bias": [True, False],
    "attention_k_eq_v": [True],
    "attention_multiplier": [0.7],
    "attn_logit_softcapping": [1.0],
    "clip_qkv": [0.3],
    "conv_bias": [True],
    "decoder_sparse_step": [2],
    "embedding_multiplier": [3.0],
    "final_logit_softcapping": [1.0],
    "first_k_dense_replace": [0, 2],
    "head_dim": [12],
    "hidden_act": ["gelu", "relu"],
    "hidden_activation": ["gelu", "silu"],
    "layer_types": [["full_attention", "sliding_attention"]],
    "lm_head_bias": [True],
    "logits_scaling": [3.0],
    "mamba_conv_bias": [False],
    "mamba_n_groups": [2],
    "mamba_proj_bias": [True],
    "mlp_bias": [True],
    "mlp_only_layers": [[0]],
    "moe_k": [3],
    "moe_layer_interval": [2],
    "moe_layer_start_index": [0],
    "moe_topk": [3],
    "n_group": [1],
    "norm_topk_prob": [True, False],
    "num_experts_per_tok": [1],
    "num_key_value_heads": [1],
    "position_embedding_type": ["rope", "nope"],
    "q_lora_rank": [None],
    "query_pre_attn_scalar": [5],
    "residual_multiplier": [0.3],
    "rms_norm_eps": [0.1],
    "rope_interleave": [False],
    "routed_scaling_factor": [2.5],
    "scoring_func": ["softmax", "sigmoid"],
    "shared_intermediate_size": [0],
    "sliding_window": [5],
    "tie_word_embeddings": [True, False],
    "topk_method": ["group_limited_greedy", "noaux_tc"],
    "use_bias": [True],
    "use_expert_bias": [True, False],
    "use_qk_norm": [True, False],
    "use_sliding_window": [True],
}
CHANGES = [{"rope": name} for name in ROPES] + [{key: it} for key, values in VALUES.items() for it in values]
KEYS = {family: CONFIG_MAPPING[family]().to_dict().keys() for family in FAMILIES}
CASES = [
    (family, change)
    for family, change in product(FAMILIES, CHANGES)
    if "rope" in change or change.keys() <= KEYS[family]
]
QUICK = ("llama", "qwen3_moe")
IDS = tokens(90, 3)


def config_of(family, change):
    change, kind = copy.deepcopy(change), CONFIG_MAPPING[family]
    raw = BASE | FAMILIES[family]
    if "rope" in change:
        name = change.pop("rope")
        rope = {"rope_type": name.split(",")[0], "rope_theta": 100.0} | ROPES[name]
        num_pairs = raw.get("qk_rope_head_dim", raw.get("head_dim", 8)) // 2
        for table in ("short_factor", "long_factor"):
            if table in rope:
                rope[table] = [rope[table] + 0.3 * pair for pair in range(num_pairs)]
        of_kinds = "sliding_attention" in (kind(**raw).rope_parameters or {})
        change["rope_parameters"] = dict.fromkeys(LOCAL_AND_GLOBAL["layer_types"], rope) if of_kinds else rope
    return kind(**raw | change)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        pytest.param(family, change, id=f"{family}-{change}", marks=[] if family in QUICK else pytest.mark.thorough)
        for family, change in CASES
    ],
)
def test_logits_are_transformers_or_the_config_is_refused(tmp_path, family, change):
    try:
        theirs = random_model(config_of(family, change))
        want = their_logits(theirs, IDS)
    except Exception as error:  # any error of transformers for a config it cannot run
        pytest.skip(f"transformers cannot run it: {error}")
    theirs.save_pretrained(tmp_path)
    try:
        ours = load(tmp_path)
    except CheckpointError:
        return
    torch.testing.assert_close(
        Cache(ours).run({"a": IDS})["a"], want, atol=2e-3 * max(want.abs().max().item(), 1.0), rtol=0
    )
