"""The search against brute force: every whole number of sequences, of experts and of layers.

What a policy costs is asked of `CostModel.predict` alone. A host has one share, and is slower with more experts on
disk.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import RAM
from moeflow.core.plan import Policy
from moeflow.planner.search.objective import KEPT_SPEED, Objective, cost_per_token, fits
from moeflow.planner.search.search import search_policy as search
from tests.planner.examples import machine, routing, small_model

MB = 10**6
LEARNT = routing(decode=(0.03, 0.15, 0.3, 0.6, 0.9), prefill=(0.1, 0.25, 0.4, 0.6, 0.8))


def slow_host(where):
    """Where the host's processor is too slow for experts, the device computes them."""
    levels = []
    for level in where.levels:
        if level.name == RAM:
            processor = dataclasses.replace(level.processor, peak_flops_per_s=(("float32", 2e9),))
            levels.append(dataclasses.replace(level, processor=processor))
        else:
            levels.append(level)
    return dataclasses.replace(where, levels=tuple(levels))


HOSTS = [machine(ram=200 * MB), machine(ram=43 * MB), machine(ram=25 * MB)]
DEVICES = [
    slow_host(machine(ram=200 * MB, device=860 * MB)),
    slow_host(machine(ram=100 * MB, device=850 * MB, link=1e8)),
    machine(ram=90 * MB, device=870 * MB, link=3e9),
    machine(ram=82 * MB, device=856 * MB, link=1e8),
]


def on_host(batch, on_disk):
    return Policy(
        batch_size=batch, micro_batch=batch, attention_on_device=False, ffn_on_device=False, experts_on_disk=on_disk
    )


def of_host(model, sizes, goal):
    """Return the least cost of the batches, each with only those experts on disk that do not fit in memory."""
    costs = []
    for batch in sizes:
        needed = model.predict(on_host(batch, 0.0)).memory["ram"] - model.machine.level(RAM).capacity_bytes
        least = max(needed / model.costs.experts_bytes, 0.0)
        shares = [share for share in (least, *(number / 10 for number in range(11))) if least <= share <= 1]
        costs += [cost_per_token(model, on_host(batch, share), goal) for share in shares]
    return min(costs)


def min_memory(model, batch, limit):
    """Return the least bytes with which a batch costs no more than a limit, by halving."""
    low, high = 0.0, 1.0
    if cost_per_token(model, on_host(batch, 0.0), "throughput") > limit:
        return None
    for _ in range(14):
        middle = (low + high) / 2
        is_fast = cost_per_token(model, on_host(batch, middle), "throughput") <= limit
        low, high = (middle, high) if is_fast else (low, middle)
    return model.predict(on_host(batch, low)).memory["ram"]


def executable(model, mu, count, most):
    """Yield every policy of so many micro-batches that an engine can be configured with, for some tokens of a pass."""
    num_experts, num_layers = model.costs.shape.routing.num_experts, model.costs.shape.num_layers
    prompts = max(mu // model.workload.prompt_len, 1)
    for tokens, experts in itertools.product((256, 512, 768), range(num_experts + 1)):
        fields = {
            "batch_size": min(mu * count, most),
            "micro_batch": mu,
            "weights_on_device": model.resident_share(experts),
            "chunk_tokens": tokens,
            "prompts": prompts,
        }
        for hosted in range(num_experts - experts + 1):
            yield Policy(
                attention_on_device=False,
                ffn_on_device=hosted < num_experts,
                experts_on_host=hosted / num_experts,
                **fields,
            )
        for layers in range(num_layers + 1):
            if layers < num_layers or experts < num_experts:
                kept = layers / num_layers
                yield Policy(attention_on_device=True, ffn_on_device=True, kv_on_device=kept, **fields)


def of_device(model, sizes, goal, most):
    """Return the least cost of all that fit."""
    every = itertools.chain.from_iterable(executable(model, mu, count, most) for mu, count in sizes)
    return min(cost_per_token(model, policy, goal) for policy in every if fits(model, policy, {}))


@pytest.mark.parametrize("where", HOSTS)
@pytest.mark.parametrize("goal", ["throughput", "latency"])
@pytest.mark.parametrize("overlap", [1.0, 0.3])
def test_a_hosts_policy_is_the_best_of_all(where, goal, overlap):
    model = small_model(where, routing=LEARNT, overlap=overlap, prefill_overlap=1 - overlap)
    found = search(model, Objective(goal=goal, max_sequences=5))
    assert fits(model, found, {})
    assert cost_per_token(model, found, goal) == pytest.approx(of_host(model, range(1, 6), goal), rel=2e-4)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("goal", "overlap"), [("throughput", 1.0), ("throughput", 0.3), ("latency", 0.3)])
def test_a_devices_policy_is_the_best_of_all(where, goal, overlap):
    model = small_model(where, overlap=overlap, prefill_overlap=1 - overlap)
    found = search(model, Objective(goal=goal, max_sequences=5))
    sizes = [(mu, count) for mu in range(1, 6) for count in range(1, 5 // mu + 1)]
    assert fits(model, found, {})
    assert cost_per_token(model, found, goal) <= of_device(model, sizes, goal, 5) * (1 + 2e-4)


@pytest.mark.parametrize("where", DEVICES[:2])
def test_a_number_of_sequences_is_cut_as_is_best(where):
    model = small_model(where)
    found = search(model, Objective(num_sequences=7))
    assert found.batch_size == 7
    assert fits(model, found, {})
    sizes = [(mu, -(-7 // mu)) for mu in range(1, 8)]
    assert cost_per_token(model, found, "throughput") <= of_device(model, sizes, "throughput", 7) * (1 + 2e-4)


@pytest.mark.parametrize("where", HOSTS)
def test_the_least_memory_at_nearly_the_best_speed(where):
    model = small_model(where, routing=LEARNT)
    found = search(model, Objective(goal="memory", max_sequences=4))
    fast = search(model, Objective(max_sequences=4))
    limit = cost_per_token(model, fast, "throughput") / KEPT_SPEED
    assert cost_per_token(model, found, "throughput") <= limit * (1 + 1e-4)
    least = min(filter(None, (min_memory(model, batch, limit) for batch in range(1, 5))))
    assert model.predict(found).memory["ram"] == pytest.approx(least, abs=1e-3 * model.costs.experts_bytes)


def test_memory_that_is_allowed_is_what_counts():
    model = small_model(machine(ram=200 * MB))
    limited = search(model, Objective(max_sequences=4, memory_limits={"ram": 43 * MB}))
    assert model.predict(limited).memory["ram"] <= 43 * MB * (1 + 1e-6)
    assert limited == search(small_model(HOSTS[1]), Objective(max_sequences=4))
    assert not fits(model, search(model, Objective(max_sequences=4)), {"ram": 40 * MB})
    unlimited = search(small_model(HOSTS[1]), Objective(max_sequences=4, memory_limits={"ram": 10**12}))
    assert unlimited == limited  # no more than there is


def test_as_many_experts_stay_in_memory_as_must():
    free = small_model(machine(ram=25 * MB))
    bound = dataclasses.replace(free, min_experts=0.9)
    assert search(free, Objective(max_sequences=2)).experts_on_disk > 0.3
    with pytest.raises(CapacityError):
        search(bound, Objective(max_sequences=2))
    roomy = dataclasses.replace(small_model(machine(ram=60 * MB)), min_experts=0.9)
    assert search(roomy, Objective(goal="memory", max_sequences=2)).experts_on_disk <= 0.1 + 1e-6


def test_without_a_disk_all_experts_stay_in_memory():
    levels = tuple(level for level in machine(ram=10**9).levels if level.name != "disk")
    where = dataclasses.replace(machine(ram=10**9), levels=levels)
    assert search(small_model(where), Objective(goal="memory", max_sequences=2)).experts_on_disk == 0
    short = tuple(dataclasses.replace(it, capacity_bytes=25 * MB) for it in levels)
    with pytest.raises(CapacityError, match="of memory"):
        search(small_model(dataclasses.replace(where, levels=short)), Objective(max_sequences=2))


def test_a_finer_grid_finds_the_batch_that_just_fits():
    """All experts must stay, and each sequence takes its blocks: as many sequences decode at once as fit."""
    free = small_model(machine(ram=10**10))
    room = free.costs.model_bytes + 333.5 * 160 * free.costs.kv_bytes  # 148 tokens, in blocks of 16
    model = dataclasses.replace(small_model(machine(ram=int(room))), min_experts=1.0)
    found = search(model, Objective(max_sequences=2000))
    best = min(cost_per_token(model, on_host(batch, 0.0), "throughput") for batch in range(1, 334))
    assert found.batch_size <= 333
    assert cost_per_token(model, found, "throughput") <= best * 1.001
