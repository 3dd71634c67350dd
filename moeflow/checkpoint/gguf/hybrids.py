"""Architectures of GGUF files with layers other than attention: short convolutions (LFM2), gated delta nets
(Qwen3-Next).

Source: as `architectures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from moeflow.checkpoint.gguf.architecture import SIGMOID, TOP_K, WIDTH, Architecture
from moeflow.checkpoint.gguf.cuts import cut_all_of_key_heads, cut_rates_and_steps
from moeflow.checkpoint.gguf.names import QWEN2_NAMES, MoeNames

_LFM2_LAYER: Final = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}


def _as_lfm2(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        **config,
        "norm_eps": config["rms_norm_eps"],
    }


_LFM2 = Architecture(
    "lfm2",
    "Lfm2ForCausalLM",
    WIDTH | {"conv_L_cache": "shortconv.l_cache"},
    {"block_auto_adjust_ff_dim": False},
    layer_names=_LFM2_LAYER,
    layer_kinds=("full_attention", "conv"),
    derive=_as_lfm2,
)
_LFM2_MOE = replace(
    _LFM2,
    model_type="lfm2_moe",
    huggingface_class="Lfm2MoeForCausalLM",
    integers={
        **_LFM2.integers,
        **TOP_K,
        "num_experts": "expert_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    constants={"norm_topk_prob": True, "use_expert_bias": True},
    moe_names=MoeNames(
        "num_experts", "feed_forward", gate="w1", up="w3", down="w2", choice_bias="feed_forward.expert_bias"
    ),
    optional={
        "num_dense_layers": ("leading_dense_block_count", 0),
        "routed_scaling_factor": ("expert_weights_scale", 1.0),
    },
    gatings=(0, SIGMOID),
)
_DELTA_LAYER: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


_DELTA_SIZES: Final = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_inner_size": "ssm.inner_size",
}


def _with_value_dim(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, "linear_value_head_dim": config["linear_inner_size"] // config["linear_num_value_heads"]}


# As Qwen3.5 has it, whose layers are the same: with a tensor for each thing that a delta net projects to.
_QWEN3_NEXT = Architecture(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    TOP_K
    | {
        "num_experts": "expert_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    | _DELTA_SIZES,
    moe_names=QWEN2_NAMES,
    layer_names=_DELTA_LAYER,
    optional={
        "full_attention_interval": ("full_attention_interval", 4),
        "num_nextn_predict_layers": ("nextn_predict_layers", 0),
    },
    may_be_partial=True,
    cuts={"ssm_ba": cut_rates_and_steps, "ssm_in": cut_all_of_key_heads},
    derive=_with_value_dim,
)
_TURNS: Final = {"linear_key_heads_take_turns": True}  # llama.cpp's conversion reorders values so
_QWEN3_5_MOE: Final = replace(_QWEN3_NEXT, constants=_TURNS)
_QWEN3_5: Final = replace(
    _QWEN3_5_MOE,
    model_type="qwen3_5_text",
    huggingface_class="Qwen3_5ForCausalLM",
    integers={**WIDTH, **_DELTA_SIZES},
    moe_names=None,
)
HYBRIDS: Final[Mapping[str, Architecture]] = {
    "lfm2": _LFM2,
    "lfm2moe": _LFM2_MOE,
    "qwen3next": _QWEN3_NEXT,
    "qwen35": _QWEN3_5,
    "qwen35moe": _QWEN3_5_MOE,
}
