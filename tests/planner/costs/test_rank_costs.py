"""Times of an engine's ranks: worked out by hand for even routing, and bounds for any routing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.hardware import RANK, REMOTE_RANK, Link, LinkRate, RankLayer
from moeflow.core.parallel_config import ParallelConfig
from moeflow.planner.costs.cost_model import CostModel, IntegerPolicy
from moeflow.planner.costs.model_costs import ModelCosts, expected_distinct
from moeflow.planner.costs.rank_costs import RankedLayers, Sharing, link_of, routing_that_reaches
from moeflow.planner.costs.roofline import divided, work_seconds
from tests.planner.examples import HALF, SMALL, machine, small_model

EVERY = SMALL.with_fields(top_k=SMALL.routing.num_experts)  # every token takes every expert: nothing is left to chance


def where(layer_s: float = 0.0, bytes_per_s: float = 1e30, exchange_bytes: int = 256):
    """Return a machine of round figures whose ranks exchange at one rate."""
    made = machine(ram=10**10)
    ram = made.level("ram")
    layers = tuple(
        RankLayer(expert_layout=experts, attention_layout=attention, seconds=layer_s)
        for experts in ("expert", "sliced")
        for attention in ("replicated", "tensor")
    )
    ram = dataclasses.replace(ram, processor=dataclasses.replace(ram.processor, rank_layers=layers))
    rates = (LinkRate(transfer_bytes=exchange_bytes, bytes_per_s=bytes_per_s),)
    links = tuple(Link(source=RANK, target=target, rates=rates) for target in (RANK, REMOTE_RANK))
    return dataclasses.replace(made, levels=(made.level("disk"), ram), links=(*made.links, *links))


def layers(num_ranks=2, shape=EVERY, on=None, **layouts) -> RankedLayers:
    on = on or where()
    parallel = ParallelConfig(num_ranks=num_ranks, **layouts)
    return RankedLayers(
        on, divided(on.level("ram"), Sharing(parallel=parallel).num_here), ModelCosts(shape, HALF), parallel
    )


def seconds(it: RankedLayers, num_tokens: float = 64.0) -> float:
    return it.seconds(num_tokens, it.costs.decode_attention(num_tokens, 100.0), 1.0)


def whole_s(it: RankedLayers, num_tokens: float = 64.0) -> float:
    """Return what one process takes, with all of the machine."""
    costs, level, count = it.costs, it.machine.level("ram"), it.costs.shape.num_layers
    works = [costs.pre_attention(num_tokens), costs.decode_attention(num_tokens, 100.0)]
    works += [costs.output_projection(num_tokens), costs.row_operations(num_tokens)]
    works += [work for _, work in costs.feed_forward(num_tokens)]
    return count * sum(work_seconds(level, work) for work in works)


def test_what_is_whole_on_both_ranks_takes_twice_as_long_on_half_a_machine():
    """Ranks share experts and both do all else: the time of one process, plus all else again, plus copies."""
    it = layers(moves_experts=False)
    costs, level, count, tokens = it.costs, it.machine.level("ram"), it.costs.shape.num_layers, 64.0
    shared_s = count * work_seconds(level, costs.experts(tokens))
    pairs_bytes = tokens * EVERY.routing.top_k * EVERY.hidden_size * 2
    copies_s = count * 2 * (pairs_bytes + pairs_bytes + tokens * EVERY.hidden_size * 2) / (1e10 / 2)
    assert seconds(it) == pytest.approx(2 * whole_s(it) - shared_s + copies_s, rel=1e-6)


@pytest.mark.parametrize("shared_width", [0, 1024])
def test_where_all_is_cut_half_a_machine_does_half_the_work_and_norms_twice(shared_width):
    shape = EVERY.with_fields(shared_intermediate_size=shared_width)
    it = layers(shape=shape, expert_layout="sliced", attention_layout="tensor")
    costs, level, count, tokens = it.costs, it.machine.level("ram"), it.costs.shape.num_layers, 64.0
    whole = (costs.row_operations(tokens), costs.router(tokens))
    again_s = count * sum(work_seconds(level, work) for work in whole)
    # Heads and outputs; then units and outputs.
    gathered = EVERY.attention.num_heads * EVERY.attention.head_dim + EVERY.hidden_size
    gathered += EVERY.routing.top_k * EVERY.feed_forward.intermediate_size + EVERY.hidden_size
    gathered += shared_width + EVERY.hidden_size if shared_width else 0
    copies_s = count * 2 * tokens * gathered * 2 / (1e10 / 2)
    assert seconds(it) == pytest.approx(whole_s(it) + again_s + copies_s, rel=1e-6)


@pytest.mark.parametrize(
    ("layouts", "number"), [({}, 1), ({"expert_layout": "sliced"}, 2), ({"attention_layout": "tensor"}, 3)]
)
def test_exchanges_and_python_are_paid_for_each_layer(layouts, number):
    """A small exchange takes 256 bytes at the link's rate; a layer's measured time includes the local exchanges."""
    free, slow, far = (
        layers(on=where(layer_s=1.0, bytes_per_s=rate), is_spread=is_spread, **layouts)
        for rate, is_spread in ((1e30, False), (25600.0, False), (25600.0, True))
    )
    assert seconds(free, 1.0) > free.costs.shape.num_layers
    assert seconds(slow, 1.0) >= seconds(free, 1.0)  # never below the measured time
    extra_s = far.link.seconds(256)
    assert extra_s == pytest.approx(0.01)
    assert far._python_s == pytest.approx(1.0 - number * extra_s)


@given(st.sampled_from([8, 64, 128]), st.integers(1, 4), st.integers(1, 512), st.floats(0.3, 1.0))
def test_routers_reach_the_share_that_is_known(num_experts, top_k, num_tokens, distinct):
    routing = routing_that_reaches(num_experts, top_k, num_tokens, distinct)
    assert routing.chances.sum() == pytest.approx(top_k)
    reached = float((1 - (1 - routing.chances) ** num_tokens).sum())
    even = expected_distinct(num_experts, top_k, num_tokens)
    assert reached == pytest.approx(max(distinct * even, top_k), rel=0.02) or reached > distinct * even  # the steepest
    if distinct == 1.0:
        assert np.ptp(routing.chances) == pytest.approx(0, abs=1e-9)


def test_replicas_share_what_a_machine_has_and_hold_all_of_a_model():
    alone, both = (small_model(machine(ram=10**10), sharing=Sharing(num_replicas=number)) for number in (1, 2))
    choice = IntegerPolicy(8, 1, False)
    assert both.memory(choice)["ram"] == alone.memory(choice)["ram"]  # of each
    work_s = alone.decode(choice)["host"].const - 1e-4 - 8e-5  # without what the engine itself takes
    assert both.decode(choice)["host"].const == pytest.approx(2 * work_s + 1e-4 + 8e-5)


def test_ranks_hold_a_model_once_but_for_what_is_whole_on_each():
    def held(**layouts) -> float:
        sharing = Sharing(parallel=ParallelConfig(num_ranks=2, moves_experts=False, **layouts))
        model: CostModel = small_model(machine(ram=10**10), sharing=sharing)
        return model.memory(IntegerPolicy(8, 1, False))["ram"].const

    costs = small_model(machine(ram=10**10)).costs
    alone = small_model(machine(ram=10**10)).memory(IntegerPolicy(8, 1, False))["ram"].const
    kv = 8 * 160 * costs.kv_bytes
    assert held() == pytest.approx(alone + costs.model_bytes - costs.experts_bytes + kv, rel=1e-6)
    assert held(attention_layout="tensor") < held() - kv


def test_a_way_that_nobody_measured_is_assumed():
    parallel = ParallelConfig(num_ranks=2)
    assumed, far = (link_of(machine(ram=1), it) for it in (parallel, dataclasses.replace(parallel, is_spread=True)))
    assert assumed.seconds(256) < far.seconds(256)
    assert link_of(where(bytes_per_s=5.0), parallel).peak_bytes_per_s == 5.0


@pytest.mark.parametrize(
    "layouts", [{"moves_experts": False}, {"expert_layout": "sliced", "attention_layout": "tensor"}]
)
@pytest.mark.parametrize("rate", [1e5, 1e8, 1e30])
def test_halves_gain_as_far_as_one_computes_while_the_other_waits(layouts, rate):
    """By hand: each half takes its work and its waits; two halves take twice the longer one, or one of each."""
    tokens = 512
    with_waits, without = (layers(on=where(bytes_per_s=it), is_spread=True, **layouts) for it in (rate, 1e30))
    attention = with_waits.costs.prefill_attention(1, tokens, tokens)
    half_attention = dataclasses.replace(
        attention,
        num_bytes=attention.num_bytes / 2,
        num_flops=attention.num_flops / 2,
        values=max(attention.values // 2, 1),
    )
    whole_s = with_waits.seconds(tokens, attention, 1.0)
    work_s, half_s = (it.seconds(tokens / 2, half_attention, 1.0) for it in (without, with_waits))
    want = whole_s / max(2 * work_s, half_s)
    assert with_waits.gain_of_halves(tokens) == pytest.approx(want)
    if rate == 1e30:
        assert want <= 1.0
