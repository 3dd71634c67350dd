"""Ranks allocate exactly the memory of the plan."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from moeflow.checkpoint.packed.weight_memory import FreshMemory
from moeflow.core.attention_config import AttentionKind, HeadSizes
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig, StageConfig
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import expert_bytes
from moeflow.models.families import gemma4_text, llama, mixtral, qwen3_moe
from moeflow.models.layers.allocation.expert_homes import home_on_ranks
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.ranks.expert_ranks import ExpertRanks
from moeflow.parallel.blocks import even_blocks, with_kv_heads_of
from moeflow.parallel.placement.expert_balancer import CHECK_PASSES, ExpertBalancer
from moeflow.parallel.placement.whole_experts import WholeExperts
from moeflow.parallel.stages import layers_of
from moeflow.planner.choices.rank_choice import RankMemory
from moeflow.planner.costs.micro_batches import micro_batch_costs
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from tests.parallel.thread_group import run_ranks
from tests.shapes import TINY

EVEN = TINY.with_fields(vocab_size=1008, num_experts=16)  # whole bands, and groups by two, so that no byte is filling
SHAPES = {
    "experts": (mixtral, EVEN),
    "tied": (mixtral, EVEN.with_fields(tie_word_embeddings=True)),
    "dense": (llama, EVEN.with_fields(num_experts=0, top_k=0)),
    "mixed": (qwen3_moe, EVEN.with_fields(num_layers=3, dense_layers=(1,), dense_intermediate_size=128)),
}
KINDS = [
    AttentionKind(EVEN.attention.rope, 9, HeadSizes(4, 16)),
    AttentionKind(EVEN.attention.rope, None, HeadSizes(1, 32, True)),
]
SHAPES["heads that differ"] = (
    gemma4_text,
    EVEN.with_fields(
        num_kv_heads=4,
        layer_kinds=tuple(KINDS),
        shared_intermediate_size=128,
        has_value_norms=True,
        has_post_norms=True,
        has_norms_of_experts=True,
    ),
)
FORMATS = Formats(matrices="int8", embeddings="int8", kv="int8", routers="float32")


def kept_by(shape: ModelConfig) -> list[int]:
    """Return the KV heads of each layer."""
    return [shape.attention.heads_of(layer).num_kv_heads for layer in range(shape.num_layers)]


class CountedMemory(FreshMemory):
    """Counts the bytes of weights; those of norms over heads are left out of costs, as they weigh next to nothing."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def block(self, num_bytes):
        self.num_bytes += num_bytes
        return super().block(num_bytes)

    def experts(self, num_experts, expert_bytes):
        self.num_bytes += num_experts * expert_bytes
        return super().experts(num_experts, expert_bytes)


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("attention_layout", ["replicated", "tensor"])
@pytest.mark.parametrize("expert_layout", ["expert", "sliced"])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_weights_and_heads_of_each_rank_are_counted(name, num_ranks, expert_layout, attention_layout):
    family, shape = SHAPES[name]
    layouts = {"expert_layout": expert_layout, "attention_layout": attention_layout}
    parallel = ParallelConfig(num_ranks=num_ranks, moves_experts=False, **layouts)
    costs = ModelCosts(shape, FORMATS)

    def held(group):
        memory = CountedMemory()
        formats = WeightFormats("int8", "int8")
        ranks = ExpertRanks.of(shape, parallel, group, range(shape.num_layers))
        allocator = PackedAllocator(
            torch.float32,
            torch.device("cpu"),
            formats,
            memory,
            home_on_ranks(group, ranks),
            tensor_group=group if attention_layout == "tensor" else None,
        )
        model = family.build(shape, allocator)
        if ranks is not None:  # in memory of their own; this rank touches only its experts
            num_held = ranks.balancer.num_held[group.rank]
            memory.num_bytes += num_held * expert_bytes(shape.hidden_size, shape.feed_forward.intermediate_size, "int8")
        norm_bytes = sum(place.nbytes for _, place in model.named_weights() if isinstance(place, torch.Tensor))
        kept = [layer.self_attn.heads.num_kv_heads for layer in model.layers]
        priced = (costs.shape.num_norms * costs.shape.num_layers + 1) * costs.shape.hidden_size * 4
        return memory.num_bytes - norm_bytes + priced, kept

    found = run_ranks(num_ranks, held)
    expected = RankMemory.of(costs, parallel)
    assert expected.weight_bytes == tuple(num_bytes for num_bytes, _ in found)
    assert [kept_by(model) for model in expected.kv_shapes] == [kept for _, kept in found]
    assert [kept_by(with_kv_heads_of(shape, parallel, rank)) for rank in range(num_ranks)] == [it for _, it in found]


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("attention_layout", ["replicated", "tensor"])
@pytest.mark.parametrize("ranks_per_stage", [1, 2])
@pytest.mark.parametrize("num_layers", [(1, 2), (2, 1), (1, 1, 1)])
def test_weights_of_each_stage_are_counted(num_layers, ranks_per_stage, attention_layout, is_tied):
    """With one dense layer among the others."""
    family, shape = qwen3_moe, SHAPES["mixed"][1].with_fields(tie_word_embeddings=is_tied)
    stages = StageConfig(num_layers=num_layers, costs=micro_batch_costs(ModelCosts(shape, FORMATS)))
    number = len(num_layers) * ranks_per_stage
    layouts = {"expert_layout": "sliced", "attention_layout": attention_layout} if ranks_per_stage > 1 else {}
    parallel = ParallelConfig(num_ranks=number, stages=stages, **layouts)
    counted = RankMemory.of(ModelCosts(shape, FORMATS), parallel)

    def held(group, first_rank):
        memory, layers = CountedMemory(), layers_of(parallel, shape, first_rank)
        allocator = PackedAllocator(
            torch.float32,
            torch.device("cpu"),
            WeightFormats("int8", "int8"),
            memory,
            home_on_ranks(group if layouts else None, None),
            tensor_group=group if layouts and attention_layout == "tensor" else None,
            own_layers=layers,
        )
        model = family.build(shape, allocator)
        norm_bytes = sum(place.nbytes for _, place in model.named_weights() if isinstance(place, torch.Tensor))
        norms = (2 * len(model.layers) + 1) * shape.hidden_size * 4  # as costs count them
        kept = [layer.self_attn.heads.num_kv_heads for layer in model.layers]
        return memory.num_bytes - norm_bytes + norms, kept

    firsts = range(0, number, ranks_per_stage)
    found = [each for first in firsts for each in run_ranks(ranks_per_stage, partial(held, first_rank=first))]
    assert counted.weight_bytes == tuple(num_bytes for num_bytes, _ in found)
    assert [kept_by(model) for model in counted.kv_shapes] == [kept for _, kept in found]


@pytest.mark.parametrize("num_redundant", [0, 1])
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_experts_that_move_are_counted_where_they_may_come_to_be(num_ranks, num_redundant):
    """Loads of one expert make it have as many homes as it may."""
    balancer = ExpertBalancer(WholeExperts.moving(num_ranks, 1, EVEN.routing.num_experts, num_redundant))
    for number in range(10 * CHECK_PASSES):
        balancer.serving_ranks(0, np.array([[0], [0], [0], [number % EVEN.routing.num_experts]]))
        balancer.switch(balancer.end_pass())
    costs = ModelCosts(EVEN, FORMATS)
    still, moving = (
        RankMemory.of(costs, ParallelConfig(num_ranks=num_ranks, moves_experts=moves, num_redundant_experts=number))
        for moves, number in ((False, 0), (True, num_redundant))
    )
    of_expert = costs.experts_bytes / EVEN.routing.num_experts  # in all layers
    blocks = even_blocks(EVEN.routing.num_experts, num_ranks)
    counted = [
        len(block) + (after - before) / of_expert
        for block, before, after in zip(blocks, still.weight_bytes, moving.weight_bytes, strict=True)
    ]
    assert all(held <= most + 1e-6 for held, most in zip(balancer.num_held, counted, strict=True))
    assert max(counted) == pytest.approx(max(balancer.num_held))
    assert sum(balancer.num_held) == EVEN.routing.num_experts + num_redundant
