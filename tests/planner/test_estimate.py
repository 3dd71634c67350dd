"""The estimate before loading equals the cost model's prediction for the configuration."""

from __future__ import annotations

import dataclasses
from math import ceil

import msgspec
import pytest

from moeflow.core.engine_config import ExpertSlotsConfig, MemoryPlan
from moeflow.kernels.cpu import extension
from moeflow.planner.costs.work_space import sampled_bytes, work_bytes
from moeflow.planner.estimate import Estimator
from moeflow.planner.hardware.hardware_json import machine_to_json
from moeflow.planner.hardware.this_machine import machine_file
from moeflow.planner.plan_text import what_to_expect
from moeflow.planner.planning import plan_for_start
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.planner.examples import machine, routing
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return str(folder)


@pytest.fixture(scope="module")
def config(model):
    return resolve(Settings(model=model, num_threads=1, max_num_seqs=4, kv_cache_bytes=1 << 20)).config


@pytest.fixture(scope="module")
def shape(model):
    where = machine(ram=2 * 10**9)
    return resolve(Settings(model=model), machine_of=lambda _: where).estimator.shape


@pytest.fixture
def streamed(config, shape):
    """Return an estimator of the configuration with memory for six of eight experts."""
    slots = ExpertSlotsConfig(packed_weights_file="x", num_slots=6, slab_bytes=2 << 20, min_slots=1)
    beside_bytes = work_bytes(shape, num_tokens=512, num_sampled=0) + ceil(sampled_bytes(shape))  # of a request alone
    limit_bytes = (1 << 28) + (1 << 20) + beside_bytes + 6 * (2 << 20)
    memory = MemoryPlan(limit_bytes=limit_bytes, process_bytes=1 << 28, weight_bytes=1 << 20, work_bytes=0)
    config = dataclasses.replace(config, experts=slots, memory=memory, kv_cache_bytes=1 << 30)
    return Estimator(config, shape, machine(ram=2 * 10**9))


def test_a_start_on_a_machine_that_was_measured_is_told_what_to_expect(model, tmp_path):
    file = machine_file(tmp_path, 1)
    file.parent.mkdir()
    file.write_text(machine_to_json(machine(ram=2 * 10**9)))
    plan = plan_for_start(Settings(model=model, num_threads=1, max_num_seqs=4, cache_dir=tmp_path))
    line = what_to_expect(plan)
    assert "tokens/s for one request, " in line
    assert " for 4 concurrent ones; first token of a 256-token prompt after " in line


def test_experts_on_disk_are_predicted_by_what_was_learnt_of_their_routers(streamed, config, model):
    plan = resolve(Settings(model=model)).plan
    draft = what_to_expect(streamed.complete(plan))
    assert "if routers choose evenly (`moeflow pack` learns how they do)" in draft
    learnt = msgspec.structs.replace(streamed, routing=routing(decode=(0.0,) * 5, prefill=(0.0,) * 5))
    known = what_to_expect(learnt.complete(plan))
    assert "if routers choose evenly" not in known
    assert known.split(", first")[0] != draft.split(", first")[0]


def test_where_the_speed_is_not_known_nothing_is_promised(model, monkeypatch):
    assert what_to_expect(resolve(Settings(model=model)).plan) == ""
    asked = []
    resolve(Settings(model=model, cpu_isa="generic"), machine_of=asked.append)  # measured is the best instruction set
    assert asked == []


def test_prefill_decode_and_memory_are_those_of_the_cost_model(config, shape):
    expected = Estimator(config, shape, machine(ram=2 * 10**9))
    small, large = expected.predict(1, 30, 10), expected.predict(4, 30, 10)
    assert small.decode_s < large.decode_s < 4 * small.decode_s
    assert large.prefill_s > small.prefill_s == small.first_token_s
    assert expected.peak_bytes(4, 30, 10) > expected.peak_bytes(1, 30, 10)


def test_experts_that_have_no_slot_are_on_disk_and_keys_take_slots(streamed):
    assert streamed.policy(1, 0).experts_on_disk == 1 - 6 / 8  # two layers of four experts
    assert streamed.policy(1, 16).experts_on_disk == 1 - 5 / 8  # 16 tokens of 256 bytes: slots are whole large pages
    assert streamed.policy(1, 16_000).experts_on_disk == 1 - 4 / 8  # 16,000 take two
    assert streamed.policy(4, 50_000).experts_on_disk == 1 - 1 / 8
    assert streamed.policy(2, 0).experts_on_disk == 1 - 5 / 8  # another request's logits
    assert streamed.memory_limits == {"ram": streamed.config.memory.limit_bytes}


def test_a_plan_is_completed_for_as_many_requests_as_have_room(config, shape):
    plan = resolve(Settings(model=config.model_path)).plan
    scheduler = dataclasses.replace(config.scheduler, num_blocks=90, max_num_seqs=32)
    small = Estimator(dataclasses.replace(config, scheduler=scheduler), shape, machine(ram=2 * 10**9))
    assert plan.workload.max_tokens == 384  # of the 512 that the model takes, half a prompt
    assert small.complete(plan).forecast.policy.batch_size == 90 // 24
