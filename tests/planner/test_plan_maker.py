from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.plan import DISK_OFFLOAD, RESIDENT, Workload, plan_from_json, plan_to_json
from moeflow.planner.plan_maker import bottleneck, expert_places, make_plan, pipeline_of
from moeflow.planner.policy_search import Objective, search
from tests.planner.examples import SHORT, machine, small_model

pytestmark = pytest.mark.slow  # each plans several times

MB = 10**6
IN_MEMORY = small_model(machine(ram=10**9))
STREAMED = small_model(machine(ram=45 * MB), overlap=0.0, prefill_overlap=0.5)
OFFLOADED = small_model(machine(ram=10**9, device=850 * MB))


@pytest.mark.parametrize(
    ("model", "pipeline"), [(IN_MEMORY, RESIDENT), (STREAMED, DISK_OFFLOAD), (OFFLOADED, "cgopipe")]
)
def test_a_plan_says_what_to_do_and_survives_json(model, pipeline):
    made = make_plan(model, Objective(max_sequences=64), model_name="small", reasons=(("weight_format", "so"),))
    assert made.pipeline == pipeline
    assert plan_from_json(plan_to_json(made), "file") == made
    prediction = model.predict(made.policy)
    assert made.tokens_per_s.low < made.tokens_per_s.value == pytest.approx(prediction.tokens_per_s)
    assert {used.tier for used in made.memory} == {tier for tier, size in prediction.memory.items() if size}
    assert all(used.peak_bytes.value <= used.capacity_bytes * 1.001 for used in made.memory)
    assert dict(made.busy) == pytest.approx(
        {n: it / prediction.decode_s for n, it in prediction.busy.items()}, abs=1e-4
    )
    assert sum(share for _, share in made.expert_places) == pytest.approx(1)
    assert [help_.speedup for help_ in made.helps] == sorted((it.speedup for it in made.helps), reverse=True)
    assert dict(made.reasons)["weight_format"] == "so"


def test_the_bottleneck_is_what_more_of_would_help():
    one = search(IN_MEMORY, Objective(num_sequences=1))
    assert bottleneck(IN_MEMORY, one) == "reading from RAM"
    streamed = make_plan(STREAMED, Objective(goal="latency"), model_name="small")
    assert streamed.bottleneck == "reading from disk"
    assert any(help_.change == "twice the memory" and help_.speedup > 1.5 for help_ in streamed.helps)


@pytest.mark.parametrize(("weights", "on_disk"), [(0.4, 0.3), (0.9, 0.1), (0.01, 0.98)])
def test_experts_are_each_in_one_place(weights, on_disk):
    policy = dataclasses.replace(
        search(OFFLOADED, Objective(max_sequences=8)), weights_on_device=weights, experts_on_disk=on_disk
    )
    places, costs = dict(expert_places(OFFLOADED, policy)), OFFLOADED.costs
    assert places["disk"] == on_disk
    assert sum(places.values()) == pytest.approx(1)
    outside = costs.layers_bytes - costs.experts_bytes  # which takes the device's memory first
    on_device = max(weights * costs.layers_bytes - outside, 0)
    assert places["device"] * costs.experts_bytes == pytest.approx(on_device, rel=1e-3)


def test_experts_of_a_host_are_in_memory_or_on_disk():
    assert dict(expert_places(IN_MEMORY, search(IN_MEMORY, Objective(max_sequences=8)))) == {"ram": 1.0, "disk": 0.0}
    dense = dataclasses.replace(
        IN_MEMORY,
        costs=dataclasses.replace(
            IN_MEMORY.costs, shape=dataclasses.replace(IN_MEMORY.costs.shape, num_experts=0, top_k=0)
        ),
    )
    assert expert_places(dense, search(dense, Objective(max_sequences=8))) == ()


def test_a_limit_on_memory_is_kept_and_doubling_it_is_weighed():
    limited = make_plan(IN_MEMORY, Objective(max_sequences=8, memory_limits={"ram": 45 * MB}), model_name="small")
    assert limited.memory_bytes == 45 * MB
    assert limited.pipeline == DISK_OFFLOAD
    assert limited.memory[0].capacity_bytes == 45 * MB
    assert "twice the memory" in {help_.change for help_ in limited.helps}


def test_latency_takes_one_sequence_or_as_few_as_keep_up_with_arrivals():
    alone = make_plan(IN_MEMORY, Objective(goal="latency"), model_name="small")
    assert alone.policy.batch_size == 1
    served = alone.tokens_per_s.value / SHORT.gen_len
    busy = dataclasses.replace(IN_MEMORY, workload=dataclasses.replace(SHORT, rate=served * 1.5))
    several = make_plan(busy, Objective(goal="latency"), model_name="small")
    assert several.policy.batch_size > 1
    assert several.tokens_per_s.value / SHORT.gen_len >= served * 1.5
    too_many = dataclasses.replace(IN_MEMORY, workload=dataclasses.replace(SHORT, rate=served * 1e3))
    with pytest.raises(CapacityError, match="requests a second are asked for, but this machine answers"):
        make_plan(too_many, Objective(goal="latency", max_sequences=32), model_name="small")


def test_what_does_not_fit_anywhere_is_refused():
    with pytest.raises(CapacityError, match="at least"):
        make_plan(small_model(machine(ram=MB)), Objective(), model_name="small")


def test_pipelines_are_those_of_the_paper():
    policy = search(OFFLOADED, Objective(max_sequences=8))
    names = {
        (False, 0.0, 0.5): "cgopipe",
        (True, 0.5, 0.5): "flexgen",
        (True, 1.0, 0.5): "zero-inference",
        (True, 1.0, 1.0): RESIDENT,
    }
    for (attention, kv, weights), name in names.items():
        changed = dataclasses.replace(policy, attention_on_device=attention, kv_on_device=kv, weights_on_device=weights)
        assert pipeline_of(OFFLOADED, changed) == name


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('"goal": "throughput"', '"goal": "fun"'), "goal is 'fun': use one of"),
        (('"kv_dtype": "bfloat16"', '"kv_dtype": "float3"'), "kv_dtype is 'float3': use one of float32"),
        (('"batch_size"', '"batch_sice"'), "policy.batch_size is missing"),
        (('"kv_cache_bytes"', '"kv_cash_bytes"'), "kv_cache_bytes is missing"),
        (('"machine": "round"', '"machine": 3'), "machine is 3: write a text"),
    ],
)
def test_a_damaged_plan_is_refused_with_field_and_remedy(change, complaint):
    text = plan_to_json(make_plan(IN_MEMORY, Objective(max_sequences=2), model_name="small"))
    assert change[0] in text
    with pytest.raises(ConfigError, match=complaint):
        plan_from_json(text.replace(*change), "file")


def test_lengths_of_a_workload():
    workload = Workload(prompt_len=10, gen_len=3, max_prompt_len=20)
    assert (workload.mean_context, workload.max_tokens) == (12.0, 23)
