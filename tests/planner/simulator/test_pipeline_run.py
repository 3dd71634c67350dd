"""Jobs on the virtual clock against bounds that need no simulation, and the paper's order of systems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.plan import Workload
from moeflow.pipeline.catalog import PIPELINES
from moeflow.pipeline.task import COMPUTE
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.simulator.pipeline_run import PipelineRun, make_policy
from tests.planner.examples import machine
from tests.shapes import MIXTRAL

WORKLOAD = Workload(prompt_len=100, gen_len=20, max_prompt_len=100)
COSTS = ModelCosts(
    replace(MIXTRAL, num_layers=4),
    Formats(matrices="float16", embeddings="float16", kv="float16", activation_bytes=2),
)


def make_run(name, machine="paper-s2", workload=WORKLOAD, micro_batch=32, number=6, share=0.1, **more):
    pipeline, host = PIPELINES[name], load_machine(machine)
    policy = make_policy(
        pipeline, host, COSTS, workload, batch_size=number * micro_batch, micro_batch=micro_batch, resident_share=share
    )
    return PipelineRun(pipeline=pipeline, machine=host, costs=COSTS, workload=workload, policy=policy, **more)


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_a_step_takes_at_least_as_long_as_its_busiest_lane_and_moves_every_weight(name):
    run = make_run(name)
    line = run.middle_step
    uses = [line.use(lane) for lane in line.lanes]
    assert line.seconds >= max(use.busy_s for use in uses) * (1 - 1e-9)
    moved = sum(one.cost.num_bytes for one in line.lanes["host_to_device"] if one.task.op == "weights_to_device")
    assert moved == pytest.approx(0.9 * COSTS.layers_bytes)
    assert run.decode_step(500).seconds >= line.seconds
    assert run.tokens_per_s == pytest.approx(192 * 20 / (run.prefill_s + run.decode_s))
    first, last = run.decode_step(101).seconds, run.decode_step(119).seconds
    assert 19 * first <= run.decode_s <= 19 * (last + 0.01)


def test_all_pipelines_compute_the_same_and_cgopipe_is_the_fastest_that_keeps_kv_on_the_host():
    runs = {name: make_run(name) for name in PIPELINES}
    flops = {sum(run.middle_step.use(lane).num_flops for lane in (COMPUTE, "host")) for run in runs.values()}
    assert max(flops) == pytest.approx(min(flops))
    steps = {name: run.middle_step.seconds for name, run in runs.items()}
    assert min(steps["fastdecode"], steps["flexgen"], steps["flexgen-cpu-attention"]) > 1.05 * steps["cgopipe"]
    assert steps["flexgen-cpu-attention"] > steps["fastdecode"]


def test_a_prefill_stores_keys_and_values_where_they_are_needed():
    run = make_run("cgopipe")
    stored = run.prefill.use("device_to_host").num_bytes
    assert stored == pytest.approx(192 * 100 * COSTS.kv_bytes)
    assert make_run("zero-inference").prefill.use("device_to_host").num_bytes == 0
    loaded = run.prefill.use("host_to_device").num_bytes
    assert loaded == pytest.approx(0.9 * COSTS.layers_bytes)


def test_as_many_weights_as_fit_stay_on_the_device():
    run = make_run("cgopipe", share=None)
    assert run.policy.weights_on_device == 1  # four layers of Mixtral on an L4
    tight = make_run("cgopipe", share=None, machine="paper-s1", micro_batch=400)
    assert 0 < tight.policy.weights_on_device < 1
    assert tight.memory["device"] == pytest.approx(load_machine("paper-s1").level("device").capacity_bytes)
    full = make_run("zero-inference", share=None, machine="paper-s1", micro_batch=3000)
    assert full.policy.weights_on_device == 0
    assert tight.fits == {"ram": True, "device": True}
    assert full.fits == {"ram": True, "device": False}


def test_a_last_smaller_micro_batch_costs_less():
    run = make_run("cgopipe")
    smaller = replace(run, policy=replace(run.policy, batch_size=161))
    assert smaller.policy.num_micro_batches == 6
    assert smaller.middle_step.use("host").busy_s < run.middle_step.use("host").busy_s


def test_one_token_takes_no_step():
    run = make_run("cgopipe", workload=Workload(prompt_len=10, gen_len=1, max_prompt_len=10))
    assert run.decode_s == 0
    assert run.tokens_per_s == pytest.approx(192 / run.prefill_s)


def test_a_machine_without_a_device_is_refused_with_what_would_help():
    with pytest.raises(ConfigError, match="no device to stream weights to: take a machine with one"):
        make_policy(
            PIPELINES["cgopipe"],
            machine(ram=2**40),
            ModelCosts(MIXTRAL, Formats(matrices="float16", embeddings="float16", kv="float16")),
            Workload(prompt_len=10, gen_len=1, max_prompt_len=10),
            batch_size=8,
            micro_batch=2,
        )
