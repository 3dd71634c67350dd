"""`moeflow simulate cache` as a user runs it, on made-up routing."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from moeflow.cli.main import main
from moeflow.experts.cache.policies import POLICIES
from moeflow.workload.routing_recorder import RoutingRecorder
from moeflow.workload.routing_trace import TraceHeader
from tests.planner.simulator.traces import make_trace, with_routers_ahead
from tests.workload.routing_files import write_trace


@pytest.fixture
def routing(tmp_path):
    return str(write_trace(tmp_path / "routing", make_trace(30)))


def run(*args):
    return CliRunner().invoke(main, ["simulate", "cache", *args])


@pytest.mark.parametrize("verb", [(), ("cache",)])
def test_help_has_examples(verb):
    shown = CliRunner().invoke(main, ["simulate", *verb, "--help"]).output
    assert re.search(r"Examples:\n(.*\n){0,2} +moeflow simulate", shown)


def test_a_table_a_size_with_belady_last(routing):
    done = run("--routing", routing)
    assert done.exit_code == 0, done.output
    for title in ("16 of 64 experts resident (25%, 15.3 MiB)", "32 of 64 experts", "48 of 64 experts"):
        assert title in done.stdout
    rows = [
        line.split() for line in done.stdout.splitlines() if re.match(r" *(next-use|fifo|lru|lfu|lfru|belady) ", line)
    ]
    assert [row[0] for row in rows] == [*(name for name in POLICIES for _ in range(3)), "belady"] * 3
    assert "30 passes, 30 tokens; disk 953.7 MiB/s" in done.stdout


def test_json_has_every_case_and_every_counter(routing):
    options = ("--slots", "10", "--slots", "50%", "--slots", "32", "--policy", "lru", "--policy", "belady")
    done = run("--routing", routing, *options, "--predictor", "none", "--predictor", "frequency", "--json")
    assert done.exit_code == 0, done.output
    results = [json.loads(line) for line in done.stdout.splitlines()]
    cases = [(one["num_slots"], one["policy"], one["predictor"]) for one in results]
    of_each_size = [("lru", "none"), ("lru", "frequency"), ("belady", "none")]
    assert cases == [(size, *rest) for size in (10, 32) for rest in of_each_size]
    best, plain = results[2], results[0]
    assert best["misses"] <= plain["misses"]
    assert plain["demand_bytes"] == plain["misses"] * 1_000_000
    assert plain["tokens_per_s"] == pytest.approx(30 / plain["seconds"])


def test_predictors_that_look_ahead_are_compared(tmp_path):
    trace = with_routers_ahead(make_trace(60, num_layers=8))
    names = ["none", "next-router", "next-router:2", "next-router:4", "combined"]
    options = [option for name in names for option in ("--predictor", name)]
    file = str(write_trace(tmp_path / "routing", trace))
    done = run("--routing", file, "--slots", "25%", "--policy", "lru", "--compute-time", "8", "--json", *options)
    assert done.exit_code == 0, done.output
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["predictor"] for one in results] == names
    assert all(one["stall_s"] < results[0]["stall_s"] for one in results[1:])
    refused = run("--routing", file, "--predictor", "sida")
    assert (refused.exit_code, "--model" in refused.stderr) == (2, True)


def test_what_is_given_goes_before_what_was_recorded(routing):
    def seconds(*args):
        done = run("--routing", routing, "--slots", "100%", "--policy", "lru", "--predictor", "none", "--json", *args)
        return json.loads(done.stdout)["seconds"]

    plain = seconds()
    assert seconds("--compute-time", "20") == pytest.approx(plain + 30 * 0.01, abs=0.02)
    assert seconds("--disk-bandwidth", "100MB") > plain + 0.1
    assert seconds("--expert-size", "10MB") == pytest.approx(seconds("--disk-bandwidth", "100MB"))


def test_a_plot_is_drawn(routing, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / "cache.png"
    done = run("--routing", routing, "--plot", str(file), "--policy", "lru", "--policy", "belady")
    assert done.exit_code == 0, done.output
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_is_named_as_no_png_is_refused_before_the_work(tmp_path):
    done = run("--routing", str(tmp_path / "not looked at"), "--plot", "cache.jpg")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "does not end in .png" in done.stderr


def test_a_torn_end_is_mentioned(routing):
    with open(routing, "ab") as stream:
        stream.write(b"torn")
    assert "last 4 bytes are cut or damaged" in run("--routing", routing).stdout


@pytest.mark.parametrize("slots", ["1", "0%", "101%", "many", "3.5", "%"])
def test_sizes_that_make_no_sense_are_refused(routing, slots):
    done = run("--routing", routing, "--slots", slots)
    assert done.exit_code == 2
    assert "neither a number of slots from 2 on nor a share like 25%" in done.stderr


def test_what_the_trace_does_not_tell_has_to_be_said(tmp_path):
    trace = make_trace(3)
    header = TraceHeader(identity="", num_layers=4, num_experts=16, top_k=2)
    recorder = RoutingRecorder(tmp_path / "routing", header)
    for layer in trace.passes[0].ids:
        recorder.add_layer(layer)
    recorder.end_pass(num_generated=1, compute_s=0)
    recorder.close()
    file = str(tmp_path / "routing")
    for args, option in (((), "--expert-size"), (("--expert-size", "1MB"), "--compute-time")):
        done = run("--routing", file, *args)
        assert (done.exit_code, option in done.stderr) == (2, True)
    assert run("--routing", file, "--expert-size", "1MB", "--compute-time", "5").exit_code == 0


def test_a_file_that_is_no_trace_is_an_error(tmp_path):
    (tmp_path / "other").write_text("nothing of the kind")
    done = run("--routing", str(tmp_path / "other"))
    assert done.exit_code == 2
    assert "is no trace of routing" in done.stderr


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_a_time_that_is_none_is_refused(routing, text):
    done = run("--routing", routing, "--compute-time", text)
    assert (done.exit_code, "no pass computes for" in done.stderr) == (2, True)
