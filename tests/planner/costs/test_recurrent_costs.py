"""What models with recurrent layers weigh and compute, counted on transformers' own."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from moeflow.core.model_config import ConfigReader
from moeflow.models.families import granitemoehybrid, lfm2, lfm2_moe, qwen3_next
from moeflow.planner.costs.model_costs import Formats, ModelCosts

LENGTH = 7
FAMILIES = {
    "lfm2": (
        lfm2,
        transformers.Lfm2Config(
            vocab_size=96,
            hidden_size=48,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=56,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
        ),
    ),
    "lfm2_moe": (
        lfm2_moe,
        transformers.Lfm2MoeConfig(
            vocab_size=96,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=56,
            moe_intermediate_size=24,
            num_experts=6,
            num_experts_per_tok=3,
            num_dense_layers=1,
            layer_types=["conv", "full_attention", "conv"],
            experts_implementation="eager",
        ),
    ),
    "qwen3_next": (
        qwen3_next,
        transformers.Qwen3NextConfig(
            vocab_size=96,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            num_experts=6,
            num_experts_per_tok=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=12,
            linear_value_head_dim=20,
            experts_implementation="eager",
        ),
    ),
    "granitemoehybrid": (
        granitemoehybrid,
        transformers.GraniteMoeHybridConfig(
            vocab_size=96,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=24,
            shared_intermediate_size=40,
            num_local_experts=6,
            num_experts_per_tok=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            mamba_n_heads=6,
            mamba_d_head=16,
            mamba_d_state=12,
            experts_implementation="eager",
        ),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_and_operations_are_those_of_transformers(name):
    family, config = FAMILIES[name]
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    shape = family.read_config(ConfigReader(config.to_dict(), "config.json"))
    costs = ModelCosts(shape, Formats(matrices="float32", embeddings="float32", kv="float32"))
    assert costs.model_bytes == pytest.approx(4 * sum(it.numel() for it in model.parameters()), rel=0.005)
    if name in ("qwen3_next", "granitemoehybrid"):  # whose own algorithms multiply whole chunks
        return
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cache = model(torch.arange(LENGTH)[None], use_cache=True).past_key_values
    expected = sum(counter.get_flop_counts()["Global"].values())
    head = costs.head(LENGTH).num_flops
    mixing = costs.attention(LENGTH, LENGTH**2, LENGTH, 1).num_flops
    layer = costs.pre_attention(LENGTH).num_flops + mixing + costs.output_projection(LENGTH).num_flops
    networks = sum(count * work.num_flops for count, work in costs.feed_forward(LENGTH))
    assert shape.num_layers * layer + networks + head == pytest.approx(expected, rel=0.02)
    attending = [cache.layers[layer_idx] for layer_idx in shape.attention_layers]
    assert LENGTH * costs.kv_bytes == 4 * sum(layer.keys.numel() + layer.values.numel() for layer in attending)
    kept = [(layer.keys, layer.values) for layer in attending]
    assert len(kept) + len(shape.recurrent.layers) == shape.num_layers


def test_each_sequence_has_its_state_read_and_written_once_a_pass():
    family, config = FAMILIES["lfm2"]
    shape = family.read_config(ConfigReader(config.to_dict(), "config.json"))
    costs = ModelCosts(shape, Formats(matrices="float32", embeddings="float32", kv="bfloat16"))
    assert shape.state_bytes == 3 * 2 * 48 * 4
    few, many = (costs.decode_attention(3, context) for context in (0.0, 100.0))
    assert shape.num_layers * few.num_bytes == pytest.approx(3 * 2 * shape.state_bytes)
    assert shape.num_layers * (many.num_bytes - few.num_bytes) == pytest.approx(3 * 100 * costs.kv_bytes)
