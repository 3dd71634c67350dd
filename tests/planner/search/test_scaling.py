"""What more processes and machines would bring, against plans with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeflow.core.attention_config import LatentConfig
from moeflow.core.hardware import RAM
from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.recurrent_config import RecurrentConfig, ShortConvConfig
from moeflow.planner.costs.rank_costs import Sharing
from moeflow.planner.search.objective import Objective, cost_per_token
from moeflow.planner.search.scaling import rank_ways, scaling_helps
from moeflow.planner.search.search import search
from tests.planner.costs.test_rank_costs import where
from tests.planner.examples import SMALL, machine, small_model

ONE = Objective(num_sequences=8)


def cost(model, objective):
    return cost_per_token(*search(model, objective), objective.goal)


def helps(model, objective=ONE):
    return {it.change: it.speedup for it in scaling_helps(cost, model, objective)}


def test_machines_that_share_nothing_bring_as_much_again_and_engines_on_one_hardly_any():
    model = small_model(where(bytes_per_s=1e9), overlap=0.0)
    found = helps(model)
    assert found["a second such machine, which serves on its own"] == 2.0
    assert 1.0 <= found["an engine more (--replicas 2)"] < 1.1  # only what an engine itself takes is done twice at once
    assert 0 < found["2 ranks on this machine (--ranks 2)"] < 1.5
    joined = found["a second such machine, as a rank (--listen-ranks)"]
    assert found["2 ranks on this machine (--ranks 2)"] < joined < 2.0
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_speed_ups_are_those_of_the_plans():
    parallel = ParallelConfig(num_ranks=2, moves_experts=False)
    on = where(bytes_per_s=1e9)
    before, after = (
        small_model(on, overlap=0.0, min_experts=1.0, sharing=Sharing(parallel=parallel, num_replicas=number))
        for number in (1, 2)
    )
    expected = 2 * cost(before, ONE) / cost(after, ONE)
    assert helps(before)["an engine more (--replicas 2)"] == pytest.approx(expected, abs=1e-3)
    assert "4 ranks on this machine (--ranks 4)" in helps(before)
    latency = Objective(goal="latency", num_sequences=1)
    assert helps(before, latency)["a second such machine, which serves on its own"] == 1.0


def test_what_has_no_room_is_left_out_and_devices_have_no_ranks():
    model = small_model(where(), overlap=0.0, min_experts=1.0)
    room = int(1.5 * model.costs.model_bytes)
    found = helps(model, Objective(num_sequences=1, memory_limits={RAM: room}))
    assert "an engine more (--replicas 2)" not in found
    assert "a second such machine, which serves on its own" in found
    assert helps(small_model(machine(ram=10**9, device=10**9))) == {}


def test_ranks_are_proposed_only_where_the_model_permits_them():
    """None for recurrent layers, no cut heads for latent attention, no whole experts where there are too few."""
    model = small_model(where(bytes_per_s=1e9), overlap=0.0)
    recurrent = RecurrentConfig((0,), ShortConvConfig(SMALL.hidden_size, kernel_size=3))
    assert not any("rank" in change for change in helps(on_shape(model, replace(SMALL, recurrent=recurrent))))
    latent = LatentConfig(None, 48, 32, 16, 32, 1e-6)
    shapes = (SMALL, SMALL.with_fields(latent=latent), SMALL.with_fields(num_experts=1, top_k=1))
    layouts = [
        {(it.attention_layout, it.expert_layout) for it in rank_ways(on_shape(model, shape), 2, is_spread=False)}
        for shape in shapes
    ]
    whole, tensor = "replicated", "tensor"
    assert layouts[0] == {(whole, "expert"), (whole, "sliced"), (tensor, "expert"), (tensor, "sliced")}
    assert layouts[1] == {(whole, "expert"), (whole, "sliced")}
    assert layouts[2] == {(whole, "sliced"), (tensor, "sliced")}


def on_shape(model, shape):
    return replace(model, costs=replace(model.costs, shape=shape))
