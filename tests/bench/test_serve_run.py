"""`bench serve` from traffic to records, with engines in processes of their own."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from moeflow.bench.metrics import Served
from moeflow.bench.serve_run import (
    RunCalls,
    Sweep,
    check_server,
    describe,
    on_and_off,
    result,
    run_engines,
    system_name,
    with_policy,
)
from moeflow.core.errors import ConfigError
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.workload.poisson import WorkloadSpec
from tests.tiny_mixtral import write_tiny_mixtral

SPEC = WorkloadSpec(rate=1.0, num_requests=12, max_prompt=20, max_new=10, vocab_size=258)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return resolve(
        Settings(model=str(folder), num_threads=1, max_num_seqs=4, max_num_batched_tokens=32, prefix_caching=False)
    ).config


def collect(results: list, requests: list) -> RunCalls:
    return RunCalls(lambda done, total: None, lambda what: None, results.append, lambda: requests.append(1))


def test_a_sweep_makes_each_rate_its_own_traffic_and_each_repetition_another():
    sweep = Sweep(SPEC, (2.0, 8.0), 3)
    assert sweep.num_runs == 6
    assert (sweep.at(8.0, 0).rate, sweep.at(8.0, 0).seed, sweep.at(8.0, 2).seed) == (8.0, 0, 2)
    assert sweep.warm_up().seed not in {sweep.at(2.0, n).seed for n in range(3)}


def test_the_static_policy_prefills_a_whole_batch_in_one_pass(config):
    static = with_policy(config, "static", max_prompt=20, batch_timeout_s=0.5).scheduler
    assert (static.policy, static.batch_timeout_s, static.max_num_batched_tokens) == ("static", 0.5, 80)
    ours = with_policy(config, "continuous", max_prompt=20, batch_timeout_s=0.5).scheduler
    assert (ours.policy, ours.max_num_batched_tokens) == ("continuous", 32)


def test_a_result_holds_the_traffic_the_figures_and_each_request():
    served = [
        Served(at_s=0.0, first_s=0.5, end_s=1.25, num_prompt=8, num_new=2),
        Served(at_s=0.5, first_s=None, end_s=2.0, num_prompt=9, num_new=0, error="refused"),
    ]
    fields = result(SPEC, served)
    assert fields["rate"] == 1.0
    assert fields["workload"]["num_requests"] == 12
    assert fields["errors"] == {"refused": 1}
    assert fields["summary"]["num_failed"] == 1
    assert fields["requests"] == {
        "at_s": [0.0, 0.5],
        "prompt": [8, 9],
        "new": [2, 0],
        "first_s": [0.5, None],
        "latency_s": [1.25, None],
    }


def test_requests_beyond_the_context_are_refused_before_anything_starts(config):
    spec = WorkloadSpec(rate=1.0, num_requests=2, max_prompt=500, max_new=100, vocab_size=258)
    with pytest.raises(ConfigError, match=r"up to 600 tokens .* allows 512: lower --max-prompt"):
        asyncio.run(run_engines([config], Sweep(spec, (1.0,), 1), collect([], [])))
    with pytest.raises(ConfigError, match="allows 512"):
        check_server(spec, 512)
    check_server(spec, None)


def test_drafts_are_measured_beside_the_same_engine_without(config):
    drafting = dataclasses.replace(config, speculators=("suffix", "/models/small.gguf"))
    static = with_policy(drafting, "static", max_prompt=20, batch_timeout_s=0.5)
    found = on_and_off([drafting, static])
    assert [system_name(one) for one in found] == ["continuous", "continuous, suffix, small", "static"]
    assert [describe(one)["speculators"] for one in found] == [[], ["suffix", "small"], []]
    assert found[0] == config
    assert on_and_off([config]) == [config]
