"""How many devices share a model: the equations of ExpertFlow 3.3, and the searches that follow them."""

from __future__ import annotations

from math import ceil

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE
from moeflow.core.plan import Policy
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES
from moeflow.planner.search.device_search import Degrees, parallel_degrees, search_devices
from moeflow.planner.search.objective import COARSE, Objective
from tests.planner.examples import machine, small_model

MB = 10**6


@pytest.mark.parametrize(
    ("given", "degrees"),
    [
        ((1, 1, 8, 8, 1), Degrees(1, 1, 1, 1)),
        ((4, 1, 8, 2, 1), Degrees(1, 1, 1, 1)),  # all need D > 1
        ((4, 2, 8, 8, 1), Degrees(2, 1, 1, 1)),  # 3.1: P > 1 and D > 1, over min(P, D) devices
        ((2, 4, 8, 8, 1), Degrees(2, 1, 1, 1)),
        ((1, 4, 8, 8, 1), Degrees(1, 1, 1, 1)),
        ((1, 4, 8, 8, 4), Degrees(1, 4, 1, 1)),  # the model exceeds one device's memory
        ((4, 4, 8, 8, 2), Degrees(2, 2, 1, 1)),
        ((1, 4, 8, 2, 4), Degrees(1, 4, 4, 1)),  # 3.2: E_tot > E_block and D > 1
    ],
)
def test_degrees_follow_the_equations(given, degrees):
    names = ("num_batches", "num_devices", "num_experts", "block_experts", "num_holding")
    assert parallel_degrees(**dict(zip(names, given, strict=True))) == degrees


def test_stages_are_those_set_by_hand():
    given = {"num_batches": 1, "num_devices": 4, "num_experts": 8, "block_experts": 8, "num_holding": 1}
    assert parallel_degrees(**given, num_stages=3).pipeline == 3


def held_bytes(number):
    """Return what each of so many devices needs for the model and one request."""
    resident = Policy(
        batch_size=1,
        micro_batch=1,
        attention_on_device=True,
        ffn_on_device=True,
        weights_on_device=1.0,
        kv_on_device=1.0,
        chunk_tokens=512,
        num_devices=number,
    )
    model = small_model(machine(ram=10**9, device=10**9, num_devices=4), num_devices=number)
    return ceil(model.memory_of(resident)[DEVICE])


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_the_fewest_devices_that_hold_the_model_share_it(number, goal):
    assert held_bytes(number) < held_bytes(number // 2 or 1) or number == 1
    model = small_model(machine(ram=10**9, device=held_bytes(number) + MB, link=1e7, num_devices=4))
    found, policy = search_devices(model, Objective(goal=goal, max_sequences=16), [1, 2, 4], COARSE)
    assert policy.is_resident
    assert found.num_devices == policy.num_devices == number


def test_all_devices_stream_a_model_that_none_of_them_holds():
    model = small_model(machine(ram=10**9, device=DEVICE_RESERVE_BYTES + 24 * MB, link=1e9, num_devices=2))
    objective = Objective(max_sequences=16)
    found, policy = search_devices(model, objective, [1, 2], COARSE)
    assert (found.num_devices, policy.num_devices, policy.is_resident) == (2, 2, False)
    assert policy.experts_on_host == 0
    try:
        alone, one = search_devices(model, objective, [1], COARSE)
    except CapacityError:
        return
    assert found.predict(policy).tokens_per_s > alone.predict(one).tokens_per_s


def test_where_nothing_fits_the_need_of_one_device_is_named():
    model = small_model(machine(ram=10 * MB, device=DEVICE_RESERVE_BYTES + MB, num_devices=2))
    with pytest.raises(CapacityError, match="needs at least"):
        search_devices(model, Objective(max_sequences=4), [1, 2], COARSE)
