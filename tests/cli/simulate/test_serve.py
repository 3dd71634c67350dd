"""`moeflow simulate serve` as a user runs it."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from moeflow.cli.main import main

TRAFFIC = ("-n", "20", "--max-prompt", "32", "--max-new", "16")


def run(model, *args, machine="h100"):
    return CliRunner().invoke(main, ["simulate", "serve", "--machine", machine, "--model", model, *TRAFFIC, *args])


def test_help_has_examples():
    shown = CliRunner().invoke(main, ["simulate", "serve", "--help"]).output
    assert re.search(r"Examples:\n(.*\n)? +moeflow simulate serve", shown)
    assert "mixtral-8x7b" in shown


def test_tables_are_those_of_bench_serve(model):
    done = run(model, "--rate", "1000", "--rate", "2000")
    assert done.exit_code == 0, done.output
    for title in ("Requests/s: ", "Generated tokens/s: ", "Latency in ms: "):
        assert title in done.stdout
    assert "continuous / static" in done.stdout
    assert "good to 25%" in done.stdout


def test_json_has_an_object_a_rate_and_policy(model):
    done = run(model, "--rate", "10", "--rate", "1000", "--json", "--max-num-seqs", "4")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    cases = [(record["rate"], record["system"]) for record in records]
    assert cases == [(rate, policy) for rate in (10, 1000) for policy in ("continuous", "static")]
    assert all(record["summary"]["num_requests"] == 20 for record in records)
    slow, fast = records[0]["summary"], records[2]["summary"]
    assert fast["requests_per_s"] > slow["requests_per_s"]
    assert fast["latency_p50_s"] >= slow["latency_p50_s"]


@pytest.mark.parametrize(
    ("args", "complaint"), [(("--rate", "0"), "make no traffic"), (("--max-num-batched-tokens", "8"), "max_num_seqs")]
)
def test_what_makes_no_sense_is_an_error(model, args, complaint):
    done = run(model, *args)
    assert done.exit_code != 0
    assert complaint in done.output


def test_a_model_that_does_not_fit_is_an_error_that_says_what_does():
    done = run("mixtral-8x7b", machine="t4")
    assert done.exit_code != 0
    assert "moeflow simulate pipeline" in done.output


def test_float32_is_slower_than_float16_and_takes_twice_the_memory():
    whole = ("--rate", "1000", "--devices", "4", "--policy", "continuous", "--json")
    done = {it: run("gpt-moe", *whole, "--weights", it, machine="g4dn-12xlarge") for it in ("float16", "float32")}
    rates = {it: json.loads(shown.stdout)["summary"]["requests_per_s"] for it, shown in done.items()}
    assert rates["float32"] < 0.6 * rates["float16"]
    one = run("gpt-moe", "--rate", "1", "--weights", "float32", machine="t4")
    assert "the model needs 25" in one.output
