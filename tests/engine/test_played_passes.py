"""Passes on a played device: who is in them, and how long they take."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.offload_config import EmulatedDeviceConfig, EmulatedSpeeds
from moeflow.core.plan import Policy, Workload
from moeflow.engine.played_passes import PlayedPasses, prompt_passes
from moeflow.pipeline.offloading import HOST
from moeflow.planner.cost_model import CostModel
from moeflow.planner.emulated_machine import with_emulated_device
from moeflow.planner.model_costs import Formats, ModelCosts
from tests.planner.examples import SMALL, machine

FORMATS = Formats(matrices="bfloat16", embeddings="bfloat16", kv="float32")
POLICY = Policy(batch_size=8, micro_batch=4, attention_on_device=False, ffn_on_device=True, chunk_tokens=64)


def passes(link=1e8, num_layers=SMALL.num_layers):
    host, shape = machine(ram=10**9), dataclasses.replace(SMALL, num_layers=num_layers)
    device = EmulatedDeviceConfig(capacity_bytes=10**9, speeds=EmulatedSpeeds(link=link))
    workload = Workload(prompt_len=40, gen_len=20, max_prompt_len=40)
    model = CostModel(with_emulated_device(host, device), ModelCosts(shape, FORMATS), workload)
    return PlayedPasses(model, host.level(RAM), 1e10, num_cores=2)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(13, 60))
def test_prompts_are_shared_out_to_passes(num_prompts, length, most_tokens):
    done = [0] * num_prompts
    for sequences in prompt_passes(num_prompts, length, most_tokens):
        assert sum(count for count, _ in sequences) <= most_tokens
        fresh = [one for one in sequences if one[1] < length]
        assert len(sequences) - len(fresh) == sum(it == length for it in done)  # who has his first token goes on
        for count, start in fresh:
            index = next(number for number, it in enumerate(done) if it < length)
            assert done[index] == start
            done[index] += count
    assert done == [length] * num_prompts


def test_a_faster_link_is_never_slower_and_weights_take_the_link_at_least():
    slow, fast = passes(1e8), passes(1e9)
    assert fast.decode_s("fastdecode", POLICY) < slow.decode_s("fastdecode", POLICY)
    streamed_s = slow.model.costs.layers_bytes / 1e8
    assert streamed_s < slow.decode_s("fastdecode", POLICY) < 2 * streamed_s
    assert slow.choices_of_hosted("cgopipe", POLICY) == [0.0]  # device and host are the same cores
    assert slow.prompts_s("cgopipe", POLICY, 1) < slow.prompts_s("cgopipe", POLICY, 8)


def test_the_host_computes_experts_where_the_link_is_slow_and_the_device_another():
    slow = passes(1e8)
    levels = tuple(
        dataclasses.replace(it, read_bytes_per_s=it.read_bytes_per_s / 2) if it.name == DEVICE else it
        for it in slow.model.machine.levels
    )
    machine_of_two = dataclasses.replace(slow.model.machine, levels=levels)
    other = dataclasses.replace(slow, model=dataclasses.replace(slow.model, machine=machine_of_two))
    sequences = [(1, 50)] * POLICY.batch_size
    alone, shared = (one.time_line("cgopipe", POLICY, sequences) for one in (slow, other))
    assert not any(one.task.op == "host_experts" for one in alone.lanes[HOST])
    assert any(one.task.op == "host_experts" for one in shared.lanes[HOST])
    assert shared.seconds < 0.5 * alone.seconds


@pytest.mark.parametrize("pipeline", ["cgopipe", "zero-inference"])
def test_some_layers_stand_for_all(pipeline):
    deep = passes(num_layers=40)
    sequences = [(1, 50)] * POLICY.batch_size
    whole = deep.time_line(pipeline, POLICY, sequences).seconds + deep.after_s(POLICY.batch_size)
    assert deep.seconds(pipeline, POLICY, sequences) == pytest.approx(whole, rel=0.03)
