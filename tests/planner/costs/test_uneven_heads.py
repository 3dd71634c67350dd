"""What models weigh and compute whose layers have different heads, counted on transformers' own."""

import copy

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from moeflow.core.model_config import ConfigReader
from moeflow.core.plan import Policy, Workload
from moeflow.models.families import gemma4_text
from moeflow.pipeline.catalog import PIPELINES
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.task_costs import decode_shape, task_cost
from moeflow.planner.simulator.pipeline_run import PipelineRun
from tests.models.test_gemma4_text import CONFIGS
from tests.planner.examples import machine

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


def costs_and_model(name):
    """Return what a model costs whose activations take four bytes, and transformers' own."""
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    shape = gemma4_text.read_config(ConfigReader(CONFIGS[name].to_dict(), "config.json"))
    formats = Formats(matrices="float32", embeddings="float32", kv="float32", activation_bytes=4)
    return ModelCosts(shape, formats), model


WHERE = machine(ram=10**9, device=10**9)
ON_HOST = Policy(batch_size=6, micro_batch=3, attention_on_device=False, ffn_on_device=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_moves_for_a_layer_is_as_wide_as_transformers_has_it(name):
    costs, model = costs_and_model(name)
    with torch.no_grad():
        kept = model(torch.arange(LENGTH)[None], use_cache=True).past_key_values.layers
    of_layers = []
    for layer, theirs in enumerate(it.self_attn for it in model.model.layers):
        shape = decode_shape(costs, 3, LENGTH, layer=layer)
        moved = {
            op: task_cost(op, WHERE, shape, ON_HOST).num_bytes
            for op in ("offload_qkv", "load_hidden", "load_kv", "store_kv")
        }
        projections = (getattr(theirs, part, None) for part in ("q_proj", "k_proj", "v_proj"))
        has_own = not theirs.is_kv_shared_layer
        of_token = (kept[layer].keys.numel() + kept[layer].values.numel()) / LENGTH if has_own else 0
        assert moved == {
            "offload_qkv": 3 * 4 * sum(it.out_features for it in projections if it is not None),
            "load_hidden": 3 * 4 * theirs.o_proj.in_features,
            "load_kv": 3 * LENGTH * 4 * of_token,
            "store_kv": 3 * 4 * of_token,
        }
        of_layers.append(moved)
    assert len({tuple(moved.values()) for moved in of_layers}) > 1
    anywhere = decode_shape(costs, 3, LENGTH)  # in any layer: as much as on average
    for op in of_layers[0]:
        average = sum(moved[op] for moved in of_layers) / len(of_layers)
        assert task_cost(op, WHERE, anywhere, ON_HOST).num_bytes == pytest.approx(average, abs=3 * 4)


def test_a_simulated_step_moves_what_its_layers_do():
    costs, model = costs_and_model("as published")
    run = PipelineRun(
        pipeline=PIPELINES["fastdecode"],
        machine=WHERE,
        costs=costs,
        workload=Workload(prompt_len=LENGTH, gen_len=3, max_prompt_len=LENGTH),
        policy=ON_HOST,
    )
    attentions = [it.self_attn for it in model.model.layers]
    projected = sum(it.q_proj.out_features + it.k_proj.out_features for it in attentions)
    projected += sum(it.v_proj.out_features for it in attentions if it.v_proj is not None)
    assert run.middle_step.use("device_to_host").num_bytes == 6 * 4 * projected
    loaded = run.middle_step.use("host_to_device").num_bytes - costs.layers_bytes
    assert loaded == pytest.approx(6 * 4 * sum(it.o_proj.in_features for it in attentions))
