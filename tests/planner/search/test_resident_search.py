"""A device that holds the model keeps it, with the sequences that brute force finds best."""

from __future__ import annotations

import dataclasses
from math import ceil

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.plan import RESIDENT, Policy
from moeflow.planner.described import pipeline_of
from moeflow.planner.search import search as searching
from moeflow.planner.search.objective import Objective, cost_per_token, fits
from moeflow.planner.search.resident_search import search_resident
from moeflow.planner.search.search import search
from tests.planner.examples import machine, small_model

MB = 10**6
LARGE = small_model(machine(ram=10**9, device=970 * MB, link=1e9))


def resident(number: int, tokens: int = 512) -> Policy:
    return Policy(
        batch_size=number,
        micro_batch=number,
        attention_on_device=True,
        ffn_on_device=True,
        weights_on_device=1.0,
        kv_on_device=1.0,
        chunk_tokens=tokens,
    )


@pytest.mark.parametrize("goal", ["throughput", "latency", "memory"])
@pytest.mark.parametrize("device", [840 * MB, 930 * MB, 935 * MB, 970 * MB])
def test_the_best_number_of_sequences_is_found(goal, device):
    model, objective = small_model(machine(ram=10**9, device=device)), Objective(goal=goal, max_sequences=40)
    sizes = [(number, tokens) for number in range(1, 41) for tokens in (512, 2048, 8192)]
    fitting = [policy for size in sizes if fits(model, policy := resident(*size), {})]
    found = search_resident(model, objective, 1.01)
    if not fitting:
        assert found is None
        return
    cost = "latency" if goal == "latency" else "throughput"
    best = min(cost_per_token(model, policy, cost) for policy in fitting)
    enough = [policy for policy in fitting if cost_per_token(model, policy, cost) <= best / 0.9]
    expected = enough[0].batch_size if goal == "memory" else None
    assert found.batch_size == expected or cost_per_token(model, found, cost) == best
    assert (found.weights_on_device, found.kv_on_device, found.experts_on_disk) == (1.0, 1.0, 0.0)


def test_prompts_of_many_sequences_take_large_passes_if_they_fit():
    """Weights are read slowly, so that a pass of 512 tokens is bound by them."""
    found, roomy = [], small_model(machine(ram=10**9, device=10**10))
    for tokens in (8192, 2048):
        size = ceil(roomy.memory_of(resident(100, tokens))["device"])
        where = machine(ram=10**9, device=size)
        *others, device = where.levels
        where = dataclasses.replace(where, levels=(*others, dataclasses.replace(device, read_bytes_per_s=1e10)))
        found.append(search_resident(small_model(where), Objective(num_sequences=100), 2.0).chunk_tokens)
    assert found == [8192, 2048]


@pytest.mark.parametrize("goal", ["throughput", "latency", "memory"])
@pytest.mark.parametrize("num_sequences", [None, 3])
def test_a_device_that_holds_the_model_keeps_it(goal, num_sequences):
    objective = Objective(goal=goal, num_sequences=num_sequences, max_sequences=16)
    model, policy = search(LARGE, objective, 2.0)
    assert pipeline_of(model, policy) == RESIDENT
    assert policy.batch_size == (num_sequences or policy.batch_size)


def test_what_does_not_fit_beside_the_model_is_streamed():
    with pytest.raises(CapacityError):
        search(LARGE, Objective(num_sequences=10**4), 2.0)
    small = small_model(machine(ram=10**9, device=910 * MB))
    assert search_resident(small, Objective(), 2.0) is None
    assert pipeline_of(*search(small, Objective(max_sequences=16), 2.0)) != RESIDENT


def test_a_pipeline_that_promises_far_more_is_preferred(monkeypatch):
    streamed = Policy(batch_size=9, micro_batch=9, attention_on_device=False, ffn_on_device=True)
    monkeypatch.setattr(searching, "search_policy", lambda *_: streamed)
    for decode_s, is_resident in ((1.0, True), (0.51, True), (0.49, False)):
        monkeypatch.setattr(
            searching, "cost_per_token", lambda _, policy, __, it=decode_s: it if policy == streamed else 1.0
        )
        _, found = search(LARGE, Objective(), 2.0)
        assert (found != streamed) == is_resident
