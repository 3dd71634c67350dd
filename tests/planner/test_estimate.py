"""What is said before loading is what the cost model says of the configuration."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.engine_config import ExpertSlotsConfig, MemoryPlan
from moeflow.kernels.cpu import extension
from moeflow.planner.costs.routing_profile import save_profile
from moeflow.planner.estimate import GUESS, HINT, can_be_predicted, expectations, what_to_expect
from moeflow.planner.hardware.hardware_json import machine_to_json
from moeflow.planner.hardware.this_machine import machine_file
from moeflow.planner.known_routing import routing_file
from moeflow.planner.resolve import decide
from moeflow.planner.settings import Settings
from tests.planner.examples import machine, routing
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    config = decide(Settings(model=str(folder), num_threads=1, max_num_seqs=4, kv_cache_bytes=1 << 20))
    return dataclasses.replace(config, cpu_isa=extension.isa_name())


@pytest.fixture
def streamed(config):
    """Return the configuration with room for six of eight experts."""
    slots = ExpertSlotsConfig(packed_weights_file="x", num_slots=6, slab_bytes=4096, min_slots=1)
    memory = MemoryPlan(limit_bytes=1 << 30, process_bytes=1 << 28, weight_bytes=1 << 20, work_bytes=0)
    return dataclasses.replace(config, experts=slots, memory=memory)


def test_a_machine_that_was_measured_tells(config, tmp_path):
    assert what_to_expect(config, tmp_path) == HINT
    file = machine_file(tmp_path, 1)
    file.parent.mkdir()
    file.write_text(machine_to_json(machine(ram=2 * 10**9)))
    line = what_to_expect(config, tmp_path)
    assert "tokens/s at batch 1 and " in line
    assert " at 4, first token of 256 after " in line
    assert GUESS not in line


def test_experts_on_disk_are_spoken_of_by_what_was_learnt_of_their_routers(streamed, tmp_path):
    file = machine_file(tmp_path, 1)
    file.parent.mkdir()
    file.write_text(machine_to_json(machine(ram=2 * 10**9)))
    guess = what_to_expect(streamed, tmp_path)
    assert guess.endswith(GUESS)
    save_profile(routing(decode=(0.0,) * 5, prefill=(0.0,) * 5), routing_file(streamed.model_path, tmp_path))
    known = what_to_expect(streamed, tmp_path)
    assert GUESS not in known
    assert known != guess.removesuffix(f"; {GUESS}")


def test_what_measurements_do_not_hold_for_is_not_spoken_of(config, tmp_path):
    assert not can_be_predicted(dataclasses.replace(config, cpu_isa=""))
    assert what_to_expect(dataclasses.replace(config, cpu_isa=""), tmp_path) == ""


def test_prefill_decode_and_memory_are_those_of_the_cost_model(config):
    expected = expectations(config, machine(ram=2 * 10**9))
    small, large = expected.predict(1, 30, 10), expected.predict(4, 30, 10)
    assert small.decode_s < large.decode_s < 4 * small.decode_s
    assert large.prefill_s > small.prefill_s == small.first_token_s
    assert expected.peak_bytes(4, 30, 10) > expected.peak_bytes(1, 30, 10)
    assert expected.max_bytes > config.kv_cache_bytes


def test_experts_that_have_no_slot_are_on_disk_and_keys_take_slots(streamed):
    expected = expectations(streamed, machine(ram=2 * 10**9))
    assert expected.policy(1, 0).experts_on_disk == 1 - 6 / 8  # two layers of four experts
    assert expected.policy(1, 16).experts_on_disk == 1 - 5 / 8  # 16 tokens of 256 bytes: one slab
    assert expected.policy(4, 500).experts_on_disk == 1 - 1 / 8
    assert expected.max_bytes == 1 << 30
