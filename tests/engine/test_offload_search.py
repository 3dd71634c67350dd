"""The best choice for a played device, against all of them, and against what the engine makes of it."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.offload_config import EmulatedDeviceConfig, EmulatedSpeeds, t4_like
from moeflow.core.plan import Workload
from moeflow.engine.offload_search import OffloadSearch
from moeflow.planner.cost_model import CostModel
from moeflow.planner.emulated_machine import with_emulated_device
from moeflow.planner.model_costs import Formats, ModelCosts
from moeflow.planner.policy_search import KEPT_SPEED, Aim
from tests.planner.examples import SMALL, machine

MB = 10**6
FORMATS = Formats(matrices="bfloat16", embeddings="bfloat16", kv="float32", activation_bytes=4)
SHORT = Workload(prompt_len=40, gen_len=20, max_prompt_len=60)
SLOW = t4_like(1e8)


def search_on(capacity=50 * MB, *, speeds=SLOW, ram=10**9, workload=SHORT):
    host = machine(ram=ram)
    device = EmulatedDeviceConfig(capacity_bytes=capacity, speeds=speeds)
    model = CostModel(with_emulated_device(host, device), ModelCosts(SMALL, FORMATS), workload, process_bytes=0)
    return OffloadSearch(model, host, device, copy_bytes_per_s=1e10, num_cores=2)


pytestmark = pytest.mark.slow  # each looks at some hundred choices


@pytest.mark.parametrize("capacity", [42 * MB, 55 * MB, 100 * MB])
@pytest.mark.parametrize("speeds", [SLOW, EmulatedSpeeds(link=1e8)])
def test_it_keeps_to_the_memories_and_no_choice_takes_less(capacity, speeds):
    search = search_on(capacity, speeds=speeds)
    best = search.best(Aim(max_sequences=64))
    assert best.prediction.memory[DEVICE] <= capacity
    assert best.prediction.memory[RAM] <= 10**9
    assert best.policy.batch_size <= 64
    least = min(one.cost("throughput") for one in search._all(Aim(max_sequences=64)))
    assert 0.95 * least <= best.cost("throughput") <= 1.8 * least  # what the clock adds is where a pipeline waits


def test_a_slower_link_or_less_memory_is_never_better():
    def rate(capacity, link):
        search = dataclasses.replace(search_on(capacity, speeds=t4_like(link)), is_coarse=True)
        return search.best(Aim(max_sequences=64)).prediction.tokens_per_s

    assert rate(45 * MB, 1e8) <= rate(60 * MB, 1e8) * 1.0001
    assert rate(60 * MB, 5e7) <= rate(60 * MB, 1e8) * 1.0001


def test_numbers_and_goals_are_kept_to():
    search = search_on()
    assert search.best(Aim(num_sequences=37)).policy.batch_size == 37
    assert search.best(Aim(goal="latency")).policy.batch_size == 1
    fast, small = search.best(Aim(max_sequences=64)), search.best(Aim(goal="memory", max_sequences=64))
    assert sum(small.prediction.memory.values()) <= sum(fast.prediction.memory.values())
    assert small.prediction.tokens_per_s >= KEPT_SPEED * fast.prediction.tokens_per_s * 0.8


def test_a_rate_is_kept_up_with_or_refused():
    alone = search_on().best(Aim(goal="latency")).prediction.tokens_per_s / SHORT.gen_len
    busy = search_on(workload=dataclasses.replace(SHORT, rate=2 * alone))
    best = busy.best(Aim(goal="latency"))
    assert best.policy.batch_size > 1
    with pytest.raises(CapacityError, match="requests a second are asked for"):
        search_on(workload=dataclasses.replace(SHORT, rate=1e5)).best(Aim(goal="latency"))


def test_too_little_memory_says_of_what():
    with pytest.raises(CapacityError, match=r"the device has 976.6 KiB, but .* Give the device more memory"):
        search_on(MB).best(Aim())
    with pytest.raises(CapacityError, match=r"need .* of memory \(28.6 MiB there\): take a smaller weight format"):
        search_on(ram=30 * MB).best(Aim())
