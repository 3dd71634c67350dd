"""`python -m studies.asynchronous` as a user runs it."""

from __future__ import annotations

import json

import pytest

from tests.studies import running


def run(model, *args):
    return running.run("studies.asynchronous", "--machine", "h100", "--model", model, "--layers", "2", *args)


def test_a_table_has_every_schedule_and_mapper(model):
    done = run(model, "--link", "100GB", "--skew", "0.8")
    assert done.exit_code == 0, done.output
    assert "16 batches of 256 in flight" in done.stdout
    for row in ("synchronous round-robin", "asynchronous round-robin", "synchronous least-loaded"):
        assert row in " ".join(done.stdout.split())


def test_the_balancing_mapper_and_no_barriers_idle_least(model):
    done = run(model, "--json", "--skew", "0.8", "--link", "100GB")
    found = {(one["schedule"], one["mapper"]): one for one in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 4
    waiting, free = found["synchronous", "round-robin"], found["asynchronous", "least-loaded"]
    assert free["idle_mean"] < waiting["idle_mean"] / 2
    assert free["seconds"] < waiting["seconds"]
    assert len(free["idle_shares"]) == 4
    assert free["idle_mean"] == pytest.approx(sum(free["idle_shares"]) / 4)


def test_batches_go_through_devices_that_have_layers(model):
    one = ("--schedule", "asynchronous", "--mapper", "layers", "--layers", "8", "--json")
    few, many = (json.loads(run(model, *one, "--batches", number).stdout) for number in ("1", "16"))
    assert many["seconds"] < 16 * few["seconds"]
    assert many["idle_mean"] < few["idle_mean"]


def test_a_trace_is_of_one_run(model, tmp_path):
    trace = tmp_path / "trace.json"
    refused = run(model, "--trace", str(trace))
    assert refused.exit_code == 2
    assert "--schedule and --mapper" in refused.output
    one = ("--schedule", "asynchronous", "--mapper", "least-loaded", "--batches", "3")
    assert run(model, *one, "--trace", str(trace)).exit_code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"device 0", "link of device 3"} <= {e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_too_much_is_refused(model):
    done = run(model, "--ranks", "4096", "--batches", "100000")
    assert done.exit_code == 2
    assert "fewer --layers or --batches" in done.output
