"""What a policy brings, as a plan holds it: intervals, memory, where experts lie, which pipeline runs it."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.hardware import RAM
from moeflow.core.plan import Policy
from moeflow.planner.described import pipeline_of
from moeflow.planner.forecast import expert_places, forecast
from tests.planner.examples import machine, small_model

HOST = small_model(machine(ram=10**9))
DEVICE_MODEL = small_model(machine(ram=10**9, device=10**9))
POLICY = Policy(
    batch_size=6,
    micro_batch=3,
    attention_on_device=True,
    ffn_on_device=True,
    weights_on_device=0.6,
    kv_on_device=0.5,
    experts_on_disk=0.1,
)


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"weights_on_device": 0.03}, (0.0, 0.9)),  # less than what all tokens need
        ({"weights_on_device": 0.95}, (0.9, 0.0)),  # the rest is on disk
    ],
)
def test_other_weights_take_the_device_before_experts(changes, places):
    found = dict(expert_places(DEVICE_MODEL, dataclasses.replace(POLICY, **changes)))
    assert found == pytest.approx({"device": places[0], "ram": places[1], "disk": 0.1}, abs=1e-6)


def test_experts_get_what_other_weights_leave():
    costs = DEVICE_MODEL.costs
    on_device = 0.6 * costs.layers_bytes - (costs.layers_bytes - costs.experts_bytes)
    found = dict(expert_places(DEVICE_MODEL, POLICY))
    assert found["device"] == pytest.approx(on_device / costs.experts_bytes, abs=1e-6)
    assert found["ram"] == pytest.approx(0.9 - found["device"], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"attention_on_device": False}, "cgopipe"),
        ({}, "flexgen"),
        ({"kv_on_device": 1.0}, "zero-inference"),
        ({"kv_on_device": 1.0, "weights_on_device": 1.0, "experts_on_disk": 0.0}, "resident"),
    ],
)
def test_pipelines(changes, name):
    assert pipeline_of(DEVICE_MODEL, dataclasses.replace(POLICY, **changes)) == name


def test_a_forecast_holds_the_prediction():
    """An uncertainty of a quarter: from 1 / 1.25 of a figure to 1.25 of it; memory is known to a twentieth."""
    model, policy = HOST, dataclasses.replace(POLICY, micro_batch=6, experts_on_disk=0.0, ffn_on_device=False)
    prediction = model.predict(policy)
    plan = forecast(model, policy, {RAM: 2 * 10**8})
    figures = {
        "prefill_tokens_per_s": 6 * 100 / prediction.prefill_s,
        "decode_tokens_per_s": 6 / prediction.decode_s,
        "tokens_per_s": prediction.tokens_per_s,
        "time_per_token_s": prediction.decode_s,
    }
    for name, value in figures.items():
        estimate = getattr(plan, name)
        assert (estimate.low, estimate.value, estimate.high) == pytest.approx((value / 1.25, value, value * 1.25)), name
    (ram,) = plan.memory
    used = prediction.memory["ram"]
    assert (ram.tier, ram.capacity_bytes) == ("ram", 2 * 10**8)
    assert (ram.peak_bytes.value, ram.peak_bytes.high) == pytest.approx((used, used * 1.05))
    tight = forecast(model, policy, {RAM: int(used * 1.01)})
    assert tight.memory[0].peak_bytes.high == int(used * 1.01)  # it will be kept to
    assert dict(plan.busy) == {"host": 1.0, "disk": 0.0}
