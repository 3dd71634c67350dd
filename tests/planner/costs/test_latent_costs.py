"""What latent attention weighs and keeps, counted on transformers' own model."""

import pytest
import torch
import transformers

from moeflow.core.model_config import ConfigReader
from moeflow.models.families import deepseek_v2
from moeflow.planner.costs.model_costs import Formats, ModelCosts

LENGTH = 7
RANKS = [None, 18]


def counted(q_lora_rank):
    config = transformers.DeepseekV2Config(
        vocab_size=96,
        hidden_size=42,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=64,
        kv_lora_rank=20,
        q_lora_rank=q_lora_rank,
        qk_nope_head_dim=14,
        qk_rope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        experts_implementation="eager",
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model, deepseek_v2.read_config(ConfigReader(config.to_dict(), "config.json"))


def costs_of(shape, **formats):
    return ModelCosts(shape, Formats(**{"matrices": "float32", "embeddings": "float32", "kv": "float32"} | formats))


def matrices(model, *parts):
    named = model.model.layers[0].self_attn.named_parameters()
    return sum(p.numel() for name, p in named if p.dim() > 1 and (not parts or name.split(".")[0] in parts))


@pytest.mark.parametrize("q_lora_rank", RANKS)
def test_weights_are_the_tensors(q_lora_rank):
    model, shape = counted(q_lora_rank)
    costs = costs_of(shape)
    assert costs.output_values == matrices(model, "o_proj")
    assert costs.qkv_values + costs.output_values == matrices(model)
    assert costs.pre_attention(5).num_bytes == 4 * costs.qkv_values
    layers = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.dim() > 1)
    assert costs.layers_bytes == 4 * layers
    up = matrices(model, "kv_b_proj")
    for is_wide, num_bytes in ((True, 4), (False, 2)):
        others = (costs.qkv_values - up) * 34 / 32
        assert costs_of(shape, matrices="int8", is_wide=is_wide).pre_attention(5).num_bytes == others + up * num_bytes


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
def test_one_latent_and_one_rotary_key_are_kept(kv):
    model, shape = counted(None)
    with torch.no_grad():
        kept = model(torch.arange(LENGTH)[None], use_cache=True).past_key_values.layers
    num_values = sum(layer.keys.numel() + layer.values.numel() for layer in kept)
    scales = 2 * 4 * len(kept) * LENGTH if kv == "int8" else 0
    value_bytes = {"float32": 4, "bfloat16": 2, "int8": 1}[kv]
    assert LENGTH * shape.kv_bytes_per_token(kv) == num_values * value_bytes + scales


def test_all_heads_meet_what_is_kept():
    _, shape = counted(None)
    attention = costs_of(shape).attention(1, 100, 50)
    assert attention.num_flops == 2 * 6 * (20 + 8 + 20) * 100  # scores, and sums of latents
    assert attention.num_bytes == 50 * (20 + 8) * 4
    assert attention.rows == 6 * 2
