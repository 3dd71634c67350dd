"""Which architectures of GGUF files there are, and how each maps to a Hugging Face family: a row each.

Source: the keys of gguf.constants; llama.cpp's conversions and its defaults for missing keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeflow.checkpoint.gguf import latent, local_heads, recurrent
from moeflow.checkpoint.gguf.architecture import SIGMOID, SOFTMAX, TOP_K, WIDTH, Architecture
from moeflow.checkpoint.gguf.cuts import cut_attention
from moeflow.checkpoint.gguf.header import GGUFHeader
from moeflow.checkpoint.gguf.hybrids import HYBRIDS
from moeflow.checkpoint.gguf.names import (
    ERNIE_NAMES,
    GEMMA4_NAMES,
    GPT_OSS_NAMES,
    GRANITE_NAMES,
    HUNYUAN_NAMES,
    MINIMAX_NAMES,
    MIXTRAL_NAMES,
    MLP_NAMES,
    QWEN2_NAMES,
    ROUTED_NAMES,
    part_of,
)
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.core.truncated_repr import truncated_repr

_ROUTED = WIDTH | TOP_K | {"n_routed_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
_ROUTING: Mapping[str, tuple[str, float | bool]] = {
    "n_shared_experts": ("expert_shared_count", 0),
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
    "norm_topk_prob": ("expert_weights_norm", False),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "num_nextn_predict_layers": ("nextn_predict_layers", 0),
}
_DBRX_EPS = 1e-5
_LLAMA = Architecture("llama", "LlamaForCausalLM", WIDTH, stores_pairs=True)
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    WIDTH | TOP_K | {"num_local_experts": "expert_count"},
    {"sliding_window": None},
    MIXTRAL_NAMES,
    stores_pairs=True,
)


def _in_sections(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Say as DBRX does what others say in keys of one level; its norms' epsilon is in no config."""
    if not math.isclose(config["rms_norm_eps"], _DBRX_EPS, rel_tol=1e-6):
        raise CheckpointError(
            f"has norms with an epsilon of {config['rms_norm_eps']}, where {_DBRX_EPS} is supported",
            remedy="Convert the model again",
        )
    attention = {"kv_n_heads": config["num_key_value_heads"], "clip_qkv": config["clip_qkv"] or None}
    ffn = {
        "ffn_hidden_size": config["intermediate_size"],
        "moe_num_experts": config["num_experts"],
        "moe_top_k": config["num_experts_per_tok"],
    }
    return {
        **config,
        "d_model": config["hidden_size"],
        "n_heads": config["num_attention_heads"],
        "n_layers": config["num_hidden_layers"],
        "max_seq_len": config["max_position_embeddings"],
        "attn_config": attention | {"rope_theta": config["rope_theta"]},
        "ffn_config": ffn,
    }


def _with_scale_of_gemma3(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add by what scores are scaled, which is otherwise in the largest model: llama.cpp knows it by its layers, too."""
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    is_27b = config["num_hidden_layers"] == 62
    return {**config, "query_pre_attn_scalar": hidden_size // num_heads if is_27b else config["head_dim"]}


_GRANITE = Architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    WIDTH | TOP_K | {"num_local_experts": "expert_count"},
    moe_names=GRANITE_NAMES,
    optional={
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "attention_multiplier": ("attention.scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
    },
    stores_pairs=True,
)
_GRANITE_SHARED = replace(
    _GRANITE,
    model_type="granitemoeshared",
    huggingface_class="GraniteMoeSharedForCausalLM",
    integers={**_GRANITE.integers, "shared_intermediate_size": "expert_shared_feed_forward_length"},
)


def _as_granite4(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Say as Granite 4.0 does whether positions rotate, what layers are, and how wide where there are no experts."""
    return {
        "layer_types": ["attention"] * config["num_hidden_layers"],
        **config,
        "shared_intermediate_size": config[
            "shared_intermediate_size" if config["num_local_experts"] else "intermediate_size"
        ],
        "position_embedding_type": "rope" if config["has_positions"] else "nope",
    }


_GRANITE_HYBRID = replace(
    _GRANITE,
    model_type="granitemoehybrid",
    huggingface_class="GraniteMoeHybridForCausalLM",
    integers=WIDTH,
    layer_names=recurrent.LAYER_NAMES
    | {f"ffn_{part}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")},  # without experts
    optional={
        **_GRANITE.optional,
        "num_local_experts": ("expert_count", 0),
        "num_experts_per_tok": ("expert_used_count", 0),
        "shared_intermediate_size": ("expert_shared_feed_forward_length", 0),
        "has_positions": ("rope.scaling.finetuned", True),
    },
    derive=_as_granite4,
    layer_kinds=("attention", "mamba"),
    mixer_keys=recurrent.mamba_keys,
)
_DEEPSEEK_V2 = Architecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _ROUTED,
    moe_names=ROUTED_NAMES,
    layer_names=latent.LAYER_NAMES,
    optional=_ROUTING,
    is_latent=True,
)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2,
    model_type="deepseek_v3",
    huggingface_class="DeepseekV3ForCausalLM",
    constants={"topk_method": "noaux_tc"},
    gatings=(0, SOFTMAX, SIGMOID),
)
_OTHERS = {
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", WIDTH),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", WIDTH),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        WIDTH
        | TOP_K
        | {
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        QWEN2_NAMES,
        optional={"num_shared_experts": ("expert_shared_count", 0)},
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _ROUTED,
        moe_names=ROUTED_NAMES,
        layer_names={"post_attention_norm": "post_attention_layernorm"},
        optional=_ROUTING,
        gatings=(0, SIGMOID),
        may_be_partial=True,
    ),
    "dots1": Architecture(
        "dots1",
        "Dots1ForCausalLM",
        _ROUTED,
        {"sliding_window": None},
        ROUTED_NAMES,
        optional=_ROUTING,
        gatings=(0, SIGMOID),
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        WIDTH
        | {
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        moe_names=ERNIE_NAMES,
        optional={
            "moe_num_shared_experts": ("expert_shared_count", 0),
            "moe_layer_start_index": ("leading_dense_block_count", 0),
            "moe_layer_interval": ("interleave_moe_layer_step", 1),
        },
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        TOP_K | {"num_local_experts": "expert_count", "intermediate_size": "expert_feed_forward_length"},
        moe_names=MINIMAX_NAMES,
        gatings=(0, SIGMOID),
        may_be_partial=True,
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        {
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "intermediate_size": "expert_shared_feed_forward_length",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        moe_names=HUNYUAN_NAMES,
        layer_names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        optional={"num_shared_expert": ("expert_shared_count", 1)},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        WIDTH | TOP_K | {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"},
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        MLP_NAMES,
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        WIDTH | TOP_K | {"num_experts": "expert_count"},
        {"norm_topk_prob": False, "clip_qkv": None},
        MLP_NAMES,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        TOP_K
        | {
            "num_local_experts": "expert_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        moe_names=GPT_OSS_NAMES,
        layer_names={"post_attention_norm": "post_attention_layernorm"},
        scaling={"truncate": False},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        WIDTH | {"sliding_window": "attention.sliding_window"},
        {"hidden_activation": "gelu_pytorch_tanh"},
        optional={
            "sliding_window_pattern": ("attention.sliding_window_pattern", 6),
            "rope_local_base_freq": ("rope.freq_base_swa", 10000.0),
            "final_logit_softcapping": ("final_logit_softcapping", 0.0),
        },
        derive=_with_scale_of_gemma3,
        layer_names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "dbrx": Architecture(
        "dbrx",
        "DbrxForCausalLM",
        WIDTH | TOP_K | {"num_experts": "expert_count"},
        moe_names=MLP_NAMES,
        layer_names={"attn_output_norm": "post_attention_layernorm"},
        optional={"clip_qkv": ("attention.clamp_kqv", 0.0)},
        eps_key="attention.layer_norm_epsilon",
        cuts={"attn_qkv": cut_attention},
        derive=_in_sections,
    ),
    "phimoe": Architecture(
        "phimoe",
        "PhiMoEForCausalLM",
        WIDTH | TOP_K | {"num_local_experts": "expert_count"},
        moe_names=MIXTRAL_NAMES,
        optional={"sliding_window": ("attention.sliding_window", 0)},
        derive=lambda config: {**config, "sliding_window": config["sliding_window"] or None},
        may_be_long=True,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        {"sliding_window": "attention.sliding_window"},
        {"hidden_activation": "gelu_pytorch_tanh"},
        GEMMA4_NAMES,
        local_heads.LAYER_NAMES,
        optional={
            "num_experts": ("expert_count", 0),
            "top_k_experts": ("expert_used_count", 0),
            "moe_intermediate_size": ("expert_feed_forward_length", 0),
            "num_kv_shared_layers": ("attention.shared_kv_layers", 0),
            "hidden_size_per_layer_input": ("embedding_length_per_layer_input", 0),
            "final_logit_softcapping": ("final_logit_softcapping", 0.0),
        },
        derive=lambda config: {**config, "enable_moe_block": config["num_experts"] > 0},
        has_local_heads=True,
    ),
    "granitemoe": _GRANITE,
    "granite": replace(_GRANITE_HYBRID, layer_kinds=None),
    "granitehybrid": _GRANITE_HYBRID,
    **HYBRIDS,
}


_NO_MODELS: Mapping[Any, str] = {  # what else GGUF files are, by general.type
    "adapter": "an adapter (LoRA) of a model",
    "mmproj": "the part of a model that takes images or sound",
    "clip-vision": "the part of a model that takes images",
    "imatrix": "an importance matrix",
    "vocab": "a vocabulary",
}


def read_architecture(header: GGUFHeader, file: Path) -> Architecture:
    """Return the family. Raises: CheckpointError for unsupported ones, with the supported names."""
    reader = ConfigReader(header.metadata, file)
    kind = reader.get(str, "general.type", "model")
    if kind in _NO_MODELS:
        raise CheckpointError(
            f"is no model, but {_NO_MODELS[kind]} (general.type {truncated_repr(kind)})",
            file=file,
            remedy="Name the GGUF file of the model itself; such additional files are not read",
        )
    name = reader.get(str, "general.architecture")
    if name == "llama":
        return _MIXTRAL if reader.get(int, "llama.expert_count", 0) > 0 else _LLAMA
    if name == "granitemoe" and not reader.get(bool, "granitemoe.rope.scaling.finetuned", True):
        return _OTHERS["granite"]  # which may have experts, and no positions
    if name == "granitemoe" and reader.get(int, "granitemoe.expert_shared_feed_forward_length", 0) > 0:
        return _GRANITE_SHARED
    if name == "deepseek2":
        return _deepseek(reader, header.tensors)
    if name not in _OTHERS:
        raise CheckpointError(
            f"is of the architecture {truncated_repr(name)}",
            file=file,
            remedy=f"Supported in GGUF files are llama (dense and Mixtral), deepseek2, {', '.join(_OTHERS)}",
        )
    return _OTHERS[name]


def _deepseek(reader: ConfigReader, tensors: Collection[str]) -> Architecture:
    """Return the DeepSeek family that scores experts as the file does.

    A bias on the choice of experts means sigmoid. Conversions of GLM-4.7-Flash have the bias, but not the function;
    llama.cpp knows that model by its size.
    """
    gating = reader.get(int, "deepseek2.expert_gating_func", 0)
    if gating == SIGMOID or any(part_of(name) == "exp_probs_b" for name in tensors):
        return _DEEPSEEK_V3
    if reader.get(bool, "deepseek2.expert_weights_norm", False):
        raise reader.error(
            f"'deepseek2.expert_gating_func' is {gating} and there is no tensor 'exp_probs_b.bias', so experts are "
            "scored by softmax. 'deepseek2.expert_weights_norm' is True, which is supported with sigmoid only"
        )
    return _DEEPSEEK_V2
