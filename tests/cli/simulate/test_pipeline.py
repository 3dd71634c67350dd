"""`moeflow simulate pipeline` as a user runs it."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from moeflow.cli.main import main
from moeflow.pipeline.catalog import PIPELINES

SIZES = ("--batch-size", "20", "--micro-batch", "4", "--prompt-len", "32", "--gen-len", "8")


def run(model, *args, machine="l4"):
    return CliRunner().invoke(main, ["simulate", "pipeline", "--machine", machine, "--model", model, *SIZES, *args])


def test_help_has_examples_and_names_what_is_shipped():
    shown = CliRunner().invoke(main, ["simulate", "pipeline", "--help"]).output
    assert re.search(r"Examples:\n(.*\n)? +moeflow simulate pipeline", shown)
    assert "paper-s1" in shown
    assert "mixtral-8x22b" in shown


def test_a_table_has_every_pipeline_the_fastest_first(model):
    done = run(model, "--resident", "0")
    assert done.exit_code == 0, done.output
    speeds, idle, needed = (
        [line.split() for line in part.splitlines() if line.strip().split(" ")[0] in PIPELINES]
        for part in re.split("Idle while|Memory needed", done.stdout)
    )
    rows = speeds
    assert [row[0] for row in rows] == [row[0] for row in idle] == [row[0] for row in needed]
    assert sorted(row[0] for row in rows) == sorted(PIPELINES)
    assert [float(row[1]) for row in rows] == sorted((float(row[1]) for row in rows), reverse=True)
    assert "20 sequences in 5 micro-batches of 4, 32 + 8 tokens, bfloat16" in done.stdout
    assert "good to 25%" in done.stdout


def test_json_has_one_object_a_pipeline(model):
    done = run(
        model, "--resident", "50", "--weights", "int8", "--json", "--pipeline", "flexgen", "--pipeline", "cgopipe"
    )
    assert done.exit_code == 0, done.output
    both = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["pipeline"] for one in both] == ["flexgen", "cgopipe"]
    for one in both:
        assert one["weights_on_device"] == 0.5
        assert one["tokens_per_s"] == pytest.approx(160 / (one["prefill_s"] + one["decode_s"]))
        assert 0 < one["weight_buffer_peak_bytes"] <= one["memory_bytes"]["device"]
        assert all(one["fits"].values())
    assert both[0]["kv_buffer_peak_bytes"] > both[1]["kv_buffer_peak_bytes"] == 0


def test_trace_and_graph_are_of_one_pipeline(model, tmp_path):
    assert "choose it with --pipeline" in run(model, "--trace", str(tmp_path / "t.json")).output
    files = tmp_path / "t.json", tmp_path / "t.dot"
    done = run(model, "--pipeline", "cgopipe", "--trace", str(files[0]), "--graph", str(files[1]))
    assert done.exit_code == 0, done.output
    names = {event["name"] for event in json.loads(files[0].read_text())["traceEvents"]}
    assert {"post_attention 3.4", "weights_to_device 0.0", "host_to_device bytes/s"} <= names
    assert files[1].read_text().startswith("digraph tasks")


def test_what_does_not_fit_is_marked(model):
    done = run(model, "--batch-size", "100000", "--micro-batch", "50000", "--pipeline", "zero-inference", machine="t4")
    assert done.exit_code == 0, done.output
    assert "(!): more than there is (device memory 14.8 GiB)" in done.stdout


@pytest.mark.parametrize(
    ("machine", "model_name", "complaint"), [("paper-s3", None, "did you mean 'paper-s"), ("t4", "nowhere", "nowhere")]
)
def test_a_wrong_name_is_an_error_that_says_what_there_is(model, machine, model_name, complaint):
    done = run(model_name or model, machine=machine)
    assert done.exit_code != 0
    assert complaint in done.output


@pytest.mark.slow  # importing matplotlib
def test_a_micro_batch_of_more_than_there_are_is_refused(model):
    done = run(model, "--batch-size", "504", "--micro-batch", "1000")
    assert done.exit_code == 2
    assert "--micro-batch 1000 is more than there are sequences (--batch-size 504)" in done.stderr


def test_more_micro_batches_than_memory_holds_are_refused(model):
    done = run(model, "--batch-size", "1000000000", "--micro-batch", "1")
    assert done.exit_code == 2
    assert "Take larger micro-batches, or fewer sequences" in " ".join(done.output.split())


def test_a_share_that_is_none_is_refused(model):
    done = run(model, "--resident", "nan")
    assert done.exit_code == 2
    assert "give a number from 0 to 100" in " ".join(done.output.split())


def test_a_picture_is_drawn(model, tmp_path):
    file = tmp_path / "lanes.png"
    assert run(model, "--picture", str(file)).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_devices_that_cannot_share_a_layer_are_refused_and_made_up_ones_told(model):
    done = run(model, "--devices", "1000", "--pipeline", "cgopipe")
    assert done.exit_code == 2
    assert "cannot each have a part of every layer: this model has 32 heads" in done.output
    done = run(model, "--devices", "2", "--pipeline", "cgopipe")
    assert done.exit_code == 0, done.output
    assert "note: l4 has 1 device(s); 2 are assumed" in done.stderr
