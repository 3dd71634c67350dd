"""What models weigh and compute whose layers have different heads, counted on transformers' own."""

import copy

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from moeflow.core.model_config import ConfigReader
from moeflow.models import gemma4_text
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from tests.models.test_gemma4_text import CONFIGS

LENGTH = 7


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_and_operations_are_those_of_transformers(name):
    config = copy.deepcopy(CONFIGS[name])
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    config.tie_word_embeddings, config.attention_bias = True, False
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    shape = gemma4_text.read_config(ConfigReader(config.to_dict(), "config.json"))
    costs = ModelCosts(shape, Formats(matrices="float32", embeddings="float32", kv="float32"))
    assert costs.model_bytes == pytest.approx(4 * sum(it.numel() for it in model.parameters()), rel=0.006)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cache = model(torch.arange(LENGTH)[None], use_cache=True).past_key_values
    expected = sum(counter.get_flop_counts()["Global"].values())
    mixing = costs.attention(LENGTH, LENGTH**2, LENGTH).num_flops
    layer = costs.pre_attention(LENGTH).num_flops + mixing + costs.output_projection(LENGTH).num_flops
    networks = sum(count * work.num_flops for count, work in costs.feed_forward(LENGTH))
    assert shape.num_layers * layer + networks + costs.head(LENGTH).num_flops == pytest.approx(expected, rel=0.02)
    kept = [layer for layer in cache.layers if layer.keys is not None]
    assert LENGTH * costs.kv_bytes == 4 * sum(layer.keys.numel() + layer.values.numel() for layer in kept)
