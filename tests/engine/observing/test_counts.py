"""Counts of experts are those of the trace of the same run, and of transformers' routers."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import numpy as np
import pytest
import torch

from moeflow.core.observation import NOT_COMPUTED, RequestQuestion, TokenQuestion, Watch
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.workload.routing_trace import read_routing_trace
from tests.engine.observing.observed_runs import (
    check_sums,
    computed,
    counted,
    counts_of,
    observe,
    observed_run,
    plain_run,
    routes_of,
    seen_by,
    table,
)
from tests.engine.submissions import run, submission, tokens
from tests.engine.test_token_trees import drafting
from tests.tiny_mixtral import write_tiny_mixtral

LONG = [(7 * index) % 250 + 2 for index in range(90)]
JOBS = [
    submission("long", LONG, max_tokens=24),
    submission("same prefix", LONG[:70], max_tokens=24),
    submission("short", [5], max_tokens=24),
    submission("other", LONG[30:60], max_tokens=24),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_mixtral(folder, num_hidden_layers=3, num_local_experts=5), str(folder)


def config_of(folder, *, num_blocks=12, **settings):
    """Passes of a part of a prompt, and so few blocks that requests are preempted."""
    limits = {"num_threads": 1, "max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 160}
    config = resolve(Settings(model=folder, **limits | settings)).config
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, num_blocks=num_blocks))


def test_counts_are_those_of_the_recorded_trace_and_observing_changes_no_token(tiny, tmp_path):
    _, folder = tiny
    seen = observed_run(config_of(folder, record_routing=tmp_path / "routing"), JOBS)
    trace = read_routing_trace(tmp_path / "routing")
    check_sums(seen.sight)
    assert seen.sight.num_passes == len(trace.passes)
    assert seen.sight.total.tokens == sum(routed.ids.shape[1] for routed in trace.passes)
    expected = counted((routed.ids for routed in trace.passes), 5)
    assert (table(seen.sight.total, seen.sight) == expected).all()
    assert (table(seen.sight.last_minute, seen.sight) == expected).all()
    last = counted([trace.passes[-1].ids], 5)
    assert (table(seen.sight.last_pass, seen.sight) == last).all()
    for name, routes in seen.routes.items():
        assert (seen.counts[name] == counted([routes[computed(routes)].transpose(1, 0, 2)], 5)).all()
    assert plain_run(config_of(folder), JOBS) == seen.tokens


def test_experts_of_tokens_are_those_of_transformers_routers(tiny):
    oracle, folder = tiny
    seen = observed_run(config_of(folder, num_blocks=60), JOBS)
    for job in JOBS:
        token_ids = [*job.prompt_token_ids, *seen.tokens[job.request_id]]
        with torch.inference_mode():
            logits = oracle(torch.tensor([token_ids]), output_router_logits=True).router_logits
        expected = np.array([layer.topk(2).indices.sort().values.numpy() for layer in logits]).transpose(1, 0, 2)
        routes = seen.routes[job.request_id]
        assert routes.shape == expected.shape
        assert (routes[-1] == NOT_COMPUTED).all()  # the last token is an input of no pass
        is_computed = computed(routes)
        assert is_computed[-1 - len(seen.tokens[job.request_id]) :][:-1].all()
        assert (np.sort(routes[is_computed]) == expected[is_computed]).all()
    assert not computed(seen.routes["same prefix"])[:64].any()  # found in the prefix tree
    assert computed(seen.routes["long"])[:-1].all()


@pytest.mark.parametrize("is_greedy", [True, False])
def test_accepted_drafts_have_their_routes_and_rejected_ones_count(tiny, is_greedy):
    _, folder = tiny
    sampling = {"max_tokens": 30} | ({"temperature": 0.0} if is_greedy else {})
    jobs = [submission(f"r{n}", LONG[n : 20 * n + 5], **sampling) for n in range(3)]
    config = config_of(folder, num_blocks=60, prefix_caching=False)
    plain = observed_run(config, jobs)
    with closing(Engine.load(config)) as engine:
        drafting(engine, plain.tokens)
        seen = observe(engine, jobs)
        passes = {name: engine.look(RequestQuestion(name)).sequences[0].passes for name in plain.tokens}
        stats = engine.stats()
    assert seen.tokens == plain.tokens
    check_sums(seen.sight)
    for name, expected in plain.routes.items():
        assert (seen.routes[name] == expected).all()
        assert (
            sum(one.num_tokens for one in passes[name]) + sum(one.num_accepted for one in passes[name])
            == len(seen.routes[name]) - 1
        )
    assert stats.accepted_tokens_total > 0
    assert stats.drafted_tokens_total > stats.accepted_tokens_total
    assert sum(one.num_drafted for found in passes.values() for one in found) == stats.drafted_tokens_total
    assert sum(one.num_accepted for found in passes.values() for one in found) == stats.accepted_tokens_total
    rejected = stats.drafted_tokens_total - stats.accepted_tokens_total
    assert seen.sight.total.tokens == plain.sight.total.tokens + rejected
    assert sum(found.sum() for found in seen.counts.values()) == 2 * 3 * plain.sight.total.tokens


def test_cancelled_requests_are_counted_as_far_as_they_came(tiny):
    _, folder = tiny
    with closing(Engine.load(config_of(folder, num_blocks=60))) as engine:
        engine.look(Watch())
        for job in JOBS:
            engine.submit(job)
        answers = {job.request_id: [] for job in JOBS}
        for _ in range(6):
            for output in engine.step():
                answers[output.request_id] += output.token_ids
        engine.cancel(["long", "short"])
        for name, outputs in run(engine).items():
            answers[name] += tokens(outputs)
        seen = seen_by(engine, answers)
        running = {name: engine.look(RequestQuestion(name)).sequences[0].is_running for name in answers}
    check_sums(seen.sight)
    assert (np.sum(list(seen.counts.values()), axis=0) == table(seen.sight.total, seen.sight)).all()
    assert not any(running.values())
    assert 0 < computed(seen.routes["long"]).sum() < len(LONG) + 24


def test_a_request_is_found_by_the_id_of_its_http_request(tiny):
    _, folder = tiny
    with closing(Engine.load(config_of(folder, num_blocks=60))) as engine:
        observe(engine, [submission(name, [5, 6], max_tokens=3) for name in ("a-0-0", "a-0-1", "ab-0-0")])
        found = engine.look(TokenQuestion("a"))
        assert [one.sequence_id for one in found.sequences] == ["a-0-0", "a-0-1"]
        assert [one.sequence_id for one in engine.look(RequestQuestion("a-0-1")).sequences] == ["a-0-1"]
        assert engine.look(RequestQuestion("unknown")).sequences == []


def test_a_failed_pass_is_not_counted_and_later_ones_are(tiny, monkeypatch):
    _, folder = tiny
    with closing(Engine.load(config_of(folder, num_blocks=60))) as engine:
        engine.look(Watch())
        runner = engine._runner
        monkeypatch.setattr(runner, "_keep", lambda *_: (_ for _ in ()).throw(ValueError("broken")))
        engine.submit(submission("first", [5, 6, 7]))
        assert run(engine)["first"][0].error is not None
        assert engine._observer._model.tap._whole == []  # its choices take no memory
        monkeypatch.undo()
        seen = observe(engine, [submission("second", [5, 6, 7], max_tokens=3)])
        check_sums(seen.sight)
        assert seen.sight.total.tokens == 5
        assert routes_of(engine, "second").shape == (6, 3, 2)
        assert counts_of(engine, "second").sum() == 5 * 3 * 2
