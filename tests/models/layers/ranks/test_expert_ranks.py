"""Experts that change ranks between passes keep the bits, and each rank's memory holds what the placement says."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from moeflow.core.model_config import EncoderConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts, expert_bytes
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.models.layers.ranks.expert_ranks import ExpertRanks
from moeflow.parallel.placement import expert_balancer, layouts
from moeflow.parallel.placement.eplb import place_by_load
from moeflow.parallel.placement.expert_balancer import ExpertBalancer
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.parallel.placement.rebalancing import ReplicaMove
from moeflow.parallel.placement.whole_experts import WholeExperts
from tests.parallel.thread_group import run_ranks
from tests.shapes import TINY

needs_kernels = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
LAYERS, EXPERTS, HIDDEN, WIDTH, TOP_K = 2, 6, 64, 32, 2
SHAPE = TINY.with_fields(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
ENCODER = EncoderConfig(num_layers=1, decoder_start_token_id=0)
BYTES = expert_bytes(HIDDEN, WIDTH, "bfloat16")


def dense_first(shape):
    return dataclasses.replace(shape, feed_forward=dataclasses.replace(shape.feed_forward, dense_layers=(0,)))


def make_layers(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        PackedExperts.pack(
            torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator),
            torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator),
            "bfloat16",
        )
        for _ in range(LAYERS)
    ]


def pass_input(seed):
    """Hidden states and choices that favour some experts, others from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    hot = torch.rand(EXPERTS, generator=generator) ** 4 * 10
    scores = torch.rand(7, EXPERTS, generator=generator) + hot.roll(seed // 20)
    weights, ids = scores.topk(TOP_K)
    return torch.randn(7, HIDDEN, generator=generator), ids, weights


@needs_kernels
@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("num_redundant", [0, 3])
def test_moves_keep_the_bits_and_the_memory_of_what_left_is_not_read(is_mapped, num_redundant, monkeypatch):
    monkeypatch.setattr(expert_balancer, "CHECK_PASSES", 5)
    layers = make_layers()

    def serve(group):
        ranks = ExpertRanks(group, ExpertBalancer(WholeExperts.moving(group.size, LAYERS, EXPERTS, num_redundant)))
        own = [fill(ranks, everything, is_mapped) for everything in layers]
        for number in range(60):
            hidden, ids, weights = pass_input(number)
            for layer, everything in zip(own, layers, strict=True):
                found = layer.compute(hidden.clone(), ids, weights)
                assert torch.equal(found, everything.compute(hidden.clone(), ids, weights))
            ranks.end_pass()
            for index, (layer, everything) in enumerate(zip(own, layers, strict=True)):
                for expert in ranks.balancer.placement.held_by(group.rank, index):
                    assert torch.equal(layer.weights_of(expert), everything.storage[expert][:BYTES])
        return ranks.balancer.num_moves, ranks.balancer.placement

    found = run_ranks(3, serve)
    assert found[0] == found[1] == found[2]
    num_moves, placement = found[0]
    assert num_moves > 5
    assert np.sum(placement.num_held()) <= LAYERS * (EXPERTS + num_redundant + 2)


@needs_kernels
def test_ranks_that_do_not_decide_alike_notice_it(monkeypatch):
    """Rows of any two experts are of one size, so that the exchange itself would succeed."""
    (everything, _) = make_layers()

    def serve(group):
        ranks = ExpertRanks(group, ExpertBalancer(WholeExperts.moving(group.size, 1, EXPERTS)))
        fill(ranks, everything, is_mapped=False)
        monkeypatch.setattr(ranks.balancer, "end_pass", lambda: [ReplicaMove(0, group.rank, from_rank=0, to_rank=1)])
        with pytest.raises(AssertionError, match="different collectives"):
            ranks.end_pass()

    run_ranks(2, serve)


def drawn(loads, num_ranks):
    """Any homes at all, one or more of each expert, as loads have them drawn; some ranks may have none."""
    random = np.random.default_rng(np.round(loads * 100).astype(int).ravel().tolist())
    homes = [
        tuple(tuple(sorted(random.permutation(num_ranks)[: random.integers(1, 3)].tolist())) for _ in layer)
        for layer in loads
    ]
    return ExpertPlacement(num_ranks, tuple(homes))


@needs_kernels
@pytest.mark.parametrize("is_mapped", [False, True])
def test_any_layout_of_another_package_keeps_the_bits(is_mapped, monkeypatch):
    monkeypatch.setattr(expert_balancer, "CHECK_PASSES", 5)
    monkeypatch.setattr(WholeExperts, "fits", lambda *given: True)  # so that experts move as they were drawn
    monkeypatch.setattr(layouts, "LAYOUTS", {"drawn": drawn})
    parallel = ParallelConfig(num_ranks=3, expert_layout="drawn")
    everything = make_layers()

    def serve(group):
        ranks = ExpertRanks.of(SHAPE, parallel, group, range(LAYERS))
        at_first = ranks.balancer.placement
        own = [fill(ranks, layer, is_mapped) for layer in everything]
        for number in range(60):
            hidden, ids, weights = pass_input(number)
            for layer, whole in zip(own, everything, strict=True):
                assert torch.equal(layer.compute(hidden.clone(), ids, weights), whole.compute(hidden, ids, weights))
            ranks.end_pass()
        return ranks.balancer.num_moves, at_first, ranks.balancer.placement

    found = run_ranks(3, serve)
    assert found[0] == found[1] == found[2]
    assert found[0][0] > 5
    assert found[0][1].homes != found[0][2].homes


@pytest.mark.parametrize(
    ("shape", "layers", "own"),
    [
        (SHAPE, range(1, 2), [1]),
        (dataclasses.replace(SHAPE, encoder=ENCODER), range(LAYERS), [0, 1, 2]),  # an encoder's layer comes first
        (dense_first(SHAPE), range(1), []),  # a stage without experts
        (dense_first(SHAPE), range(1, LAYERS), [0]),
    ],
)
def test_experts_begin_where_the_recorded_loads_of_their_own_layers_call_for(shape, layers, own):
    drawn_loads = np.random.default_rng(0).integers(1, 100, (shape.num_moe_layers, EXPERTS))
    parallel = ParallelConfig(num_ranks=2, expert_loads=tuple(map(tuple, drawn_loads.tolist())))

    def begin(group):
        return ExpertRanks.of(shape, parallel, group, layers).balancer.placement.homes

    places = [place_by_load(drawn_loads[number][None].astype(float), 2, EXPERTS // 2, 0).homes for number in own]
    assert run_ranks(2, begin) == [tuple(homes for (homes,) in places)] * 2


def test_ranks_whose_packages_lay_experts_out_otherwise_notice_it(monkeypatch):
    """One of another version on another machine, say."""
    parallel = ParallelConfig(num_ranks=2, expert_layout="mine")

    def serve(group):
        with pytest.raises(AssertionError, match="different collectives"):
            ExpertRanks.of(SHAPE, parallel, group, range(LAYERS))

    turned = itertools.count()  # another one for each that asks

    def place(loads, num_ranks):
        turn = next(turned)
        return ExpertPlacement(num_ranks, (tuple(((e + turn) % num_ranks,) for e in range(EXPERTS)),) * LAYERS)

    monkeypatch.setattr(layouts, "LAYOUTS", {"mine": place})
    run_ranks(2, serve)


def fill(ranks, everything, is_mapped):
    """A layer whose rank has only its own experts, or a file with all of them."""
    memory = None if is_mapped else LazyMemory(EXPERTS * BYTES)
    storage = everything.storage if memory is None else memory.tensor.view(EXPERTS, BYTES)
    layer = ranks.add_layer(PackedExperts(EXPERTS, HIDDEN, WIDTH, "bfloat16", storage=storage), memory)
    for expert, parts in enumerate(layer.parts()):
        if parts is not None and not is_mapped:
            layer.weights_of(expert).copy_(everything.storage[expert][:BYTES])
    return layer
