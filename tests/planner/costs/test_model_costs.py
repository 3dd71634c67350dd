"""Costs against what torch counts in transformers' own model, and against the thesis' sums."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.attention_config import AttentionKind
from moeflow.kernels.weight_format import BITS_PER_VALUE, LayerFormats
from moeflow.models.registry import read_model_config
from moeflow.planner.costs.model_costs import Formats, KernelWork, ModelCosts, expected_distinct
from tests.planner.costs.thesis_flops import attention_flops, flops_saved, flops_saved_as_published
from tests.shapes import MIXTRAL, TINY

FLOATS = Formats(matrices="float32", embeddings="float32", kv="float32")
SHAPE = TINY.with_fields(vocab_size=128, hidden_size=32, num_layers=3, head_dim=8, intermediate_size=48, num_experts=4)


def whole_pass(costs: ModelCosts, num_tokens: int, attention: KernelWork) -> float:
    layer = [costs.pre_attention(num_tokens), costs.output_projection(num_tokens), attention]
    once = sum(work.num_flops for work in layer) * costs.shape.num_layers
    later = sum(count * work.num_flops for count, work in costs.feed_forward(num_tokens))
    return once + later + costs.head(num_tokens).num_flops


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["eager"])
def test_flops_are_those_that_torch_counts_in_transformers_model(experts):
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
        experts_implementation=experts,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    length = 10
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None])
    costs = ModelCosts(SHAPE, FLOATS)
    squares = costs.attention(length, length * length, length)  # the eager form computes what the mask hides, too
    assert counter.get_total_flops() == pytest.approx(whole_pass(costs, length, squares), rel=0.01)


@given(st.integers(1, 60), st.integers(0, 60))
def test_attention_with_projections_is_the_thesis_formula(num_new, num_before):
    length = num_before + num_new
    dense = SHAPE.with_fields(num_kv_heads=4)
    costs = ModelCosts(dense, FLOATS)
    ours = costs.attention(num_new, num_new * length, length).num_flops
    ours += costs.pre_attention(num_new).num_flops + costs.output_projection(num_new).num_flops
    softmax = 4 * dense.attention.num_heads * num_new * length
    assert ours + softmax == attention_flops(num_new, length, num_heads=4, head_dim=8, width=32)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 4), st.integers(1, 16), st.integers(1, 64))
def test_the_savings_of_a_cache_are_the_sum_of_all_steps(start, more, heads, head_dim, width):
    sizes = {"num_heads": heads, "head_dim": head_dim, "width": width}
    end = start + more
    without = sum(attention_flops(length, length, **sizes) for length in range(start, end + 1))
    prompt = attention_flops(start, start, **sizes)
    cached = prompt + sum(attention_flops(1, length, **sizes) for length in range(start + 1, end + 1))
    assert flops_saved(start, end, **sizes) == without - cached
    assert flops_saved_as_published(start, end, **sizes) == without + cached - 2 * prompt


def test_the_savings_of_the_thesis_example():
    assert (
        flops_saved_as_published(32, 128, num_heads=3, head_dim=5, width=7) == 128 * (21986 + 5 * (21986 + 489 * 7)) * 3
    )


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 200))
def test_distinct_experts_stay_between_one_tokens_and_all(num_experts, top_k, num_tokens):
    top_k = min(top_k, num_experts)
    distinct = expected_distinct(num_experts, top_k, num_tokens)
    assert top_k - 1e-9 <= distinct <= min(num_experts, top_k * num_tokens) + 1e-9


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 400))
def test_prefill_sees_what_its_chunks_see(length, chunk, window):
    costs = ModelCosts(SHAPE, FLOATS)
    work = costs.prefill_attention(2, length, chunk)
    assert work.num_flops == 4 * 4 * 8 * 2 * sum(range(1, length + 1))
    whole_chunks = costs.prefill_attention(2, chunk * 3, chunk)
    assert whole_chunks.num_bytes == pytest.approx(2 * (chunk + 2 * chunk + 3 * chunk) * costs.kv_layer_bytes)
    windowed = ModelCosts(SHAPE.with_fields(sliding_window=window), FLOATS)
    assert windowed.decode_attention(1, length).num_bytes == min(length, window) * costs.kv_layer_bytes
    kinds = (AttentionKind(None, window), *[AttentionKind(None, None)] * (SHAPE.num_layers - 1))
    mixed = ModelCosts(SHAPE.with_fields(layer_kinds=kinds), FLOATS)
    for seen in (lambda it: it.decode_attention(1, length), lambda it: it.prefill_attention(2, length)):
        one, others, found = (seen(it).num_flops for it in (windowed, costs, mixed))
        assert found == pytest.approx((one + others * (SHAPE.num_layers - 1)) / SHAPE.num_layers)


def test_formats_change_bytes_and_not_operations():
    wide, narrow = ModelCosts(SHAPE, FLOATS), ModelCosts(SHAPE, Formats(matrices="int4", embeddings="int8", kv="int8"))
    assert narrow.experts(3).num_flops == wide.experts(3).num_flops
    assert narrow.experts(3).num_bytes * 32 == pytest.approx(wide.experts(3).num_bytes * 4.5)
    assert narrow.kv_layer_bytes == 2 * 2 * (8 + 4)
    assert narrow.experts(0).rows == 0


@pytest.mark.weights
def test_weights_take_what_a_real_checkpoint_takes(builtin_model):
    with closing(open_checkpoint(builtin_model)) as checkpoint:
        shape = read_model_config(checkpoint)
        dtype = next(info.stored_as for info in checkpoint.tensors.values())
        costs = ModelCosts(shape, Formats(matrices=dtype, embeddings=dtype, kv="float32"))
        stored = sum(info.num_bytes for info in checkpoint.tensors.values())
    assert costs.model_bytes == pytest.approx(stored, rel=0.001)


def layer_formats(**changed):
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "up", "down")
    return LayerFormats(**(dict.fromkeys(parts, "q4_k") | changed))


def test_layers_in_formats_of_their_own_are_added_up():
    wider = layer_formats(v_proj="q6_k", down="q6_k")
    formats = Formats(
        matrices="q4_k",
        embeddings="q4_k",
        kv="float32",
        routers="float32",
        head="q6_k",
        layers=(wider, *[layer_formats()] * (MIXTRAL.num_layers - 1)),
    )
    alike = dataclasses.replace(formats, head=None, layers=())
    costs, uniform = ModelCosts(MIXTRAL, formats), ModelCosts(MIXTRAL, alike)
    values = MIXTRAL.hidden_size * MIXTRAL.attention.head_dim * MIXTRAL.attention.num_kv_heads
    values += MIXTRAL.routing.num_experts * MIXTRAL.hidden_size * MIXTRAL.feed_forward.intermediate_size
    values += MIXTRAL.vocab_size * MIXTRAL.hidden_size
    more = values * (BITS_PER_VALUE["q6_k"] - BITS_PER_VALUE["q4_k"]) / 8
    assert costs.model_bytes == pytest.approx(uniform.model_bytes + more, rel=1e-12)
    said_of_each = dataclasses.replace(alike, layers=(layer_formats(),) * MIXTRAL.num_layers)
    assert ModelCosts(MIXTRAL, said_of_each).model_bytes == pytest.approx(uniform.model_bytes, rel=1e-12)
    assert costs.head(1).dtype == "q6_k"
    assert costs.experts(1).num_bytes > uniform.experts(1).num_bytes
