"""What a model weighs and computes, counted on the tensors and products of transformers' own models of every family."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property

import gguf
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from moeflow.core.model_config import ConfigReader
from moeflow.models.families import dots1, hunyuan_v1_moe, llama, mixtral, olmoe, qwen2_moe, qwen3_moe
from moeflow.planner.costs.model_costs import Formats, ModelCosts, expected_distinct
from tests.shapes import MIXTRAL, TINY

FLOATS = Formats(matrices="float32", embeddings="float32", kv="float32")
LENGTH = 7  # of the prompt
# No two sizes are alike, so that none can stand for another.
DECODER = {
    "vocab_size": 96,
    "hidden_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
MOE = {"num_experts_per_tok": 3, "experts_implementation": "eager"}
FAMILIES = {
    "llama": (llama, transformers.LlamaConfig(**DECODER, intermediate_size=56)),
    "llama, tied": (llama, transformers.LlamaConfig(**DECODER, intermediate_size=56, tie_word_embeddings=True)),
    "mixtral": (mixtral, transformers.MixtralConfig(**DECODER, **MOE, intermediate_size=24, num_local_experts=5)),
    "qwen3_moe": (
        qwen3_moe,
        transformers.Qwen3MoeConfig(
            **DECODER, **MOE, intermediate_size=56, moe_intermediate_size=24, num_experts=5, mlp_only_layers=[1]
        ),
    ),
    "qwen2_moe": (
        qwen2_moe,
        transformers.Qwen2MoeConfig(
            **DECODER | {"hidden_size": 60},
            **MOE,
            intermediate_size=56,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            num_experts=5,
            mlp_only_layers=[1],
        ),
    ),
    "dots1": (
        dots1,
        transformers.Dots1Config(
            **DECODER,
            **MOE,
            intermediate_size=56,
            moe_intermediate_size=24,
            n_shared_experts=2,
            n_routed_experts=5,
            first_k_dense_replace=1,
        ),
    ),
    "hunyuan_v1_moe": (
        hunyuan_v1_moe,
        transformers.HunYuanMoEV1Config(
            **DECODER, moe_topk=3, experts_implementation="eager", intermediate_size=24, num_experts=5
        ),
    ),
    "olmoe": (
        olmoe,
        transformers.OlmoeConfig(**DECODER | {"hidden_size": 60}, **MOE, intermediate_size=24, num_experts=5),
    ),
}
ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
SHARED = ("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
DENSE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class Counted:
    """A tiny model of a family: its tensors, and the operations of a pass over a prompt, by module."""

    def __init__(self, family, config):
        config._attn_implementation = "eager"
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        self.shape = family.read_config(ConfigReader(config.to_dict(), "config.json"))
        self.dense_layers = [i for i, layer in enumerate(self.model.model.layers) if not hasattr(layer.mlp, "experts")]
        self.moe_layers = [i for i in range(self.shape.num_layers) if i not in self.dense_layers]

    @cached_property
    def run(self):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            output = self.model(torch.arange(LENGTH)[None], use_cache=True)
        return output, counter.get_flop_counts()

    def flops(self, *modules, layer=0):
        """Operations of all that is below some modules of a layer, as far as it has them."""
        prefix = f"{type(self.model).__name__}.model.layers.{layer}."
        return sum(sum(self.run[1].get(prefix + module, {}).values()) for module in modules)

    def weights(self, *modules, layer=0):
        """Values of the matrices below some modules of a layer; vectors are norms."""
        prefixes = tuple(f"model.layers.{layer}.{module}." for module in modules)
        return sum(p.numel() for name, p in self.model.named_parameters() if name.startswith(prefixes) and p.dim() > 1)

    def norms(self):
        """Values of the norms of hidden states."""
        names = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
        return sum(p.numel() for name, p in self.model.named_parameters() if name.endswith(names))

    def matrices(self, inside_layers):
        return sum(
            p.numel()
            for name, p in self.model.named_parameters()
            if p.dim() > 1 and name.startswith("model.layers.") == inside_layers
        )


@pytest.fixture(scope="module", params=FAMILIES)
def counted(request):
    return Counted(*FAMILIES[request.param])


def costs_of(counted, **formats):
    return ModelCosts(
        counted.shape, Formats(**{"matrices": "float32", "embeddings": "bfloat16", "kv": "float16"} | formats)
    )


def test_weights_are_the_tensors(counted):
    costs = costs_of(counted)
    for layer in range(3):
        assert costs.qkv_values == counted.weights(*QKV, layer=layer)
        assert costs.output_values == counted.weights("self_attn.o_proj", layer=layer)
    for layer in counted.dense_layers:
        assert costs.dense_values == counted.weights("mlp", layer=layer)
        assert costs.dense(1).num_bytes == 4 * counted.weights(*DENSE, layer=layer)
        assert costs.dense(1).values == counted.weights(*DENSE, layer=layer)
    for layer in counted.moe_layers:
        assert costs.router_values == counted.weights(*ROUTERS, layer=layer)
        assert costs.shared_values == counted.weights(*SHARED, layer=layer)
        experts = counted.model.model.layers[layer].mlp.experts
        assert costs.expert_values == experts.gate_up_proj[0].numel() + experts.down_proj[0].numel()
        assert costs.expert_bytes == experts.gate_up_proj[0].nbytes + experts.down_proj[0].nbytes
    assert (costs.num_dense_layers, costs.num_moe_layers) == (len(counted.dense_layers), len(counted.moe_layers))
    assert costs.experts_bytes == 4 * sum(counted.weights("mlp.experts", layer=i) for i in counted.moe_layers)
    assert costs.layers_bytes == 4 * counted.matrices(inside_layers=True)
    assert costs.embedding_bytes == 2 * counted.matrices(inside_layers=False)
    assert costs.model_bytes == costs.layers_bytes + costs.embedding_bytes + 4 * counted.norms()


def test_keys_and_values_are_those_that_the_model_keeps(counted):
    kept = counted.run[0].past_key_values.layers
    num_values = [layer.keys.numel() + layer.values.numel() for layer in kept]
    for kv, num_bytes in (("float32", 4), ("float16", 2), ("bfloat16", 2)):
        costs = costs_of(counted, kv=kv)
        assert [LENGTH * costs.kv_layer_bytes] * 3 == [num_bytes * number for number in num_values]
        assert LENGTH * costs.kv_bytes == num_bytes * sum(num_values)
    one = kept[0]
    num_heads = (one.keys.numel() + one.values.numel()) // LENGTH // one.keys.shape[-1]
    assert costs_of(counted, kv="int8").kv_layer_bytes == num_heads * (10 + 4)  # a float32 scale a head
    assert costs_of(counted).attention(1, 1, 1).values == num_values[0] / LENGTH


def test_operations_are_those_that_torch_counts(counted):
    costs = costs_of(counted)
    head = sum(counted.run[1][f"{type(counted.model).__name__}.lm_head"].values())
    assert costs.head(LENGTH).num_flops == head
    for layer in range(3):
        assert costs.pre_attention(LENGTH).num_flops == counted.flops(*QKV, layer=layer)
        assert costs.output_projection(LENGTH).num_flops == counted.flops("self_attn.o_proj", layer=layer)
        softmax = counted.flops("self_attn", layer=layer) - counted.flops(*QKV, "self_attn.o_proj", layer=layer)
        assert costs.attention(LENGTH, LENGTH**2, LENGTH).num_flops == softmax  # with what the mask hides
    for layer in counted.moe_layers:
        assert costs.router(LENGTH).num_flops == counted.flops(*ROUTERS, layer=layer)
        assert costs.shared(LENGTH).num_flops == counted.flops(*SHARED, layer=layer)
        assert costs.experts(LENGTH).num_flops == counted.flops("mlp.experts", layer=layer)
    for layer in counted.dense_layers:
        assert costs.dense(LENGTH).num_flops == counted.flops("mlp", layer=layer)
    ffn = sum(count * work.num_flops for count, work in costs.feed_forward(LENGTH))
    assert ffn == sum(counted.flops("mlp", layer=layer) for layer in range(3))


def test_each_stage_reads_its_weights_once(counted):
    costs = costs_of(counted)
    assert costs.pre_attention(5).num_bytes == 4 * counted.weights(*QKV)
    assert costs.pre_attention(5).values == counted.weights(*QKV)
    assert costs.output_projection(5).num_bytes == 4 * counted.weights("self_attn.o_proj")
    assert costs.head(5).num_bytes == counted.model.lm_head.weight.numel() * 2
    assert costs.head(5).dtype == "bfloat16"
    assert [work.rows for work in (costs.pre_attention(5), costs.head(5), costs.dense(5))] == [5, 5, 5]
    for layer in counted.moe_layers:
        assert costs.router(5).num_bytes == 4 * counted.weights(*ROUTERS, layer=layer)
        assert costs.shared(5).num_bytes == 4 * counted.weights(*SHARED, layer=layer)
        assert costs.experts(5, distinct=5).num_bytes == 4 * counted.weights("mlp.experts", layer=layer)
        assert costs.experts(5, distinct=2).num_bytes == 4 * counted.weights("mlp.experts", layer=layer) * 2 / 5
        assert costs.experts(5, distinct=2).rows == 5 * 3 / 2  # a token goes to three experts
        assert costs.experts(5, distinct=2).values == costs.expert_values


def test_mixtral_has_the_published_number_of_parameters():
    config = transformers.MixtralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    layers = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.dim() > 1) * 16
    assert layers + 2 * 32000 * 4096 + 65 * 4096 == 46_702_792_704  # 65 norms
    costs = ModelCosts(MIXTRAL, Formats(matrices="int8", embeddings="float16", kv="float16"))
    assert costs.layers_bytes == layers * 34 / 32
    assert costs.embedding_bytes == 2 * 32000 * 4096 * 2


@pytest.mark.parametrize(
    ("dtype", "kind"), [("int8", "Q8_0"), ("int4", "Q4_0"), ("float16", "F16"), ("bfloat16", "BF16")]
)
def test_formats_take_what_their_blocks_take_in_a_gguf_file(dtype, kind):
    values_a_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    formats = Formats(matrices=dtype, embeddings="float32", kv="float32")
    assert formats.weight_bytes * values_a_block == block_bytes
    costs = ModelCosts(TINY, formats)
    assert costs.experts(1, distinct=1).num_bytes * values_a_block == costs.expert_values * block_bytes


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_tokens"), [(4, 2, 2), (5, 1, 3), (4, 3, 3), (3, 3, 1), (6, 2, 1)]
)
def test_distinct_experts_are_the_mean_over_all_choices(num_experts, top_k, num_tokens):
    choices = list(itertools.combinations(range(num_experts), top_k))
    unions = [len(set().union(*them)) for them in itertools.product(choices, repeat=num_tokens)]
    assert expected_distinct(num_experts, top_k, num_tokens) == pytest.approx(sum(unions) / len(unions))
    assert expected_distinct(0, 0, 3) == 0


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 40))
def test_attention_looks_at_what_the_mask_shows(length, window, chunk):
    """Each pair of a query and a position that it sees costs two products of a head's width, in each head."""
    for shape, width in ((TINY, length), (TINY.with_fields(sliding_window=window), window)):
        costs = ModelCosts(shape, FLOATS)
        shown = sum(position <= query < position + width for query in range(length) for position in range(length))
        assert costs.prefill_attention(3, length, chunk).num_flops == 3 * shown * 2 * 2 * 16 * 4
        step = costs.decode_attention(3, length)
        assert step.num_flops == 3 * min(length, width) * 2 * 2 * 16 * 4
        assert step.num_bytes == 3 * min(length, width) * costs.kv_layer_bytes
        assert step.rows == 2  # queries of one token that share a head's K and V


@given(st.integers(1, 12), st.integers(1, 12))
def test_each_chunk_of_a_prompt_reads_all_that_came_before(num_chunks, chunk):
    costs = ModelCosts(TINY, FLOATS)
    length = num_chunks * chunk
    seen_by_chunks = sum(range(chunk, length + 1, chunk))
    work = costs.prefill_attention(3, length, chunk)
    assert work.num_bytes == pytest.approx(3 * min(seen_by_chunks, length * (length + 1) / 2) * costs.kv_layer_bytes)
    shown = length * (length + 1) / 2
    assert work.rows == pytest.approx(2 * max(shown / seen_by_chunks, 1))
    assert costs.prefill_attention(3, length).num_bytes == 3 * length * costs.kv_layer_bytes
    assert costs.prefill_attention(3, length, length + 5) == costs.prefill_attention(3, length)


def test_what_passes_between_operations():
    """Worked by hand for 5 tokens, 64 wide, four heads of 16 on two of K and V, two experts of 256 a token."""
    costs = ModelCosts(TINY, FLOATS)
    norms_and_residuals = 2 * 2 * 64 + 2 * 2 * 64  # each read and written
    rotated_and_stored = 2 * (4 + 2 + 2) * 16
    assert costs.row_operations(5).num_bytes == 5 * (norms_and_residuals + rotated_and_stored) * 4
    gate_up_and_product = 3 * 256
    assert costs.activation_bytes(5) == 5 * (2 * 64 + 2 * (gate_up_and_product + 64)) * 4
    narrow = TINY.with_fields(intermediate_size=1, num_experts=0, top_k=0)
    assert ModelCosts(narrow, FLOATS).activation_bytes(5) == 5 * (2 * 64 + (4 + 2 + 2) * 16) * 4
    half = dataclasses.replace(FLOATS, activation_bytes=2)
    assert 2 * ModelCosts(TINY, half).row_operations(5).num_bytes == costs.row_operations(5).num_bytes


def test_a_model_without_experts_has_none_and_intensity_is_operations_a_byte():
    dense = ModelCosts(TINY.with_fields(num_experts=0, top_k=0), FLOATS)
    assert (dense.num_moe_layers, dense.num_dense_layers, dense.experts_bytes) == (0, 2, 0)
    assert [count for count, _ in dense.feed_forward(3)] == [2]
    assert dense.dense(3).intensity == 2 * 3 / 4  # an addition and a product for each of 3 rows, four bytes a weight
    assert dataclasses.replace(dense.dense(3), num_bytes=0).intensity == 0
    mixed = ModelCosts(TINY.with_fields(dense_layers=(1,), dense_intermediate_size=7), FLOATS)
    assert [count for count, _ in mixed.feed_forward(3)] == [1, 1, 1]
    assert mixed.dense_values == 3 * 64 * 7
