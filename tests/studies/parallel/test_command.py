"""`python -m studies.parallel` as a user runs it, on a layer of a few kilobytes."""

from __future__ import annotations

import json

import pytest

from moeflow.kernels.cpu import extension
from moeflow.planner.hardware.host import host_resources
from studies.parallel.__main__ import MEASURED
from tests.planner.examples import machine
from tests.studies import running

SMALL = ("--hidden", "32", "--width", "48", "--ranks", "2", "--experts", "4", "--tokens", "16", "--repeats", "2")


def run(*args: str):
    return running.run("studies.parallel", *SMALL, *args)


def test_help_explains_the_layouts():
    shown = running.run("studies.parallel", "--help").output
    assert all(f'"{name}"' in shown for name in MEASURED)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--skew-experts", "5"), "5 of 4 experts cannot be hot"),
        (("--top-k", "5"), "5 experts a token cannot be taken from 4"),
        (("--ranks", "49"), "49 ranks cannot each have a slice of 48 units"),
    ],
)
def test_what_makes_no_sense_is_refused(args, complaint):
    done = run(*args)
    assert done.exit_code == 2
    assert complaint in " ".join(done.output.split())


@pytest.mark.thorough
@pytest.mark.skipif(not extension.is_available(), reason="needs the CPU extension")
def test_a_grid_is_measured_recorded_and_drawn(tmp_path, monkeypatch):
    measured = []
    described = machine(ram=10**10)
    monkeypatch.setattr(
        "studies.parallel.__main__.this_machine",
        lambda folder, *, shapes, **others: measured.append((others["num_threads"], len(shapes))) or described,
    )
    out, picture = tmp_path / "records.jsonl", tmp_path / "picture.png"
    grid = ("--skew", "0", "--skew", "0.9", "--layout", "sliced", "--validate")
    done = run(*grid, "--out", str(out), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert measured == [(min(2, host_resources().num_cores), 3)]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(it["kind"], it["router_skew"], it["seed"]) for it in records] == [("parallel", 0, 0), ("parallel", 0.9, 0)]
    assert [list(it["layouts"]) for it in records] == [["capacity-dropless", "sliced"]] * 2
    assert "Speed-up over capacity-dropless: 2 ranks, top 1, experts of two matrices 32 x 48" in done.stdout
    assert "Critical paths of sliced lie within" in done.stdout
    assert "Predicted and measured work of a rank differ by" in done.stdout
    assert picture.stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason="needs the CPU extension")
def test_json_is_the_record_and_options_count_more_than_the_preset():
    done = run("--preset", "builtin", "--weights", "float32", "--not-gated", "--json")
    assert done.exit_code == 0, done.output
    (record,) = map(json.loads, done.stdout.splitlines())
    shape = {"num_ranks": 2, "num_experts": 4, "top_k": 2, "hidden": 32, "width": 48, "is_gated": False}
    assert record["layer"] == {**shape, "weights": "float32"}
    assert list(record["layouts"]) == list(MEASURED)
    assert record["machine"]["threads"] == 1
