"""`moeflow bench` as a user runs it, on a model of a few kilobytes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner

from moeflow.bench.engine_speed import Stopwatch
from moeflow.cli.main import main
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return str(folder)


def run(*args: str):
    return CliRunner().invoke(main, ["bench", *args])


def engine(folder: str, *args: str):
    return run("engine", folder, "--threads", "1", "--new-tokens", "3", "--repeats", "2", *args)


def serve(folder: str, *args: str):
    small = ("-n", "6", "--max-prompt", "20", "--max-new", "6", "--threads", "1", "--max-num-seqs", "4")
    return run("serve", folder, *small, *args)


@pytest.fixture
def quick_ceilings(monkeypatch):
    monkeypatch.setattr("moeflow.bench.ceilings.measure_read", lambda num_threads: 1e10)
    monkeypatch.setattr("moeflow.bench.ceilings.measure_flops", lambda num_threads: 1e11)


@pytest.mark.parametrize("verb", [(), ("engine",), ("serve",), ("batch",), ("quality",)])
def test_help_has_examples(verb):
    shown = run(*verb, "--help").output
    assert re.search(r"Examples:\n +moeflow bench", shown)


def test_an_unknown_measurement_is_an_error():
    result = run("speed")
    assert result.exit_code == 2
    assert "No such command 'speed'" in result.stderr


def test_engine_shows_a_row_for_each_case_and_keeps_a_record(folder, tmp_path, quick_ceilings):
    out = tmp_path / "new" / "results.jsonl"
    done = engine(folder, "--batch", "1", "--batch", "3", "--prefill", "40", "--prefill", "600", "--out", str(out))
    assert done.exit_code == 0, done.output
    for text in ("decode, batch 1", "decode, batch 3", "prefill 40", "Not run: prefill 600", "10.0 (10.0-10.0) GB/s"):
        assert text in done.stdout
    (record,) = map(json.loads, out.read_text().splitlines())
    assert (record["kind"], record["seed"], record["is_complete"]) == ("engine", 0, True)
    assert [case["name"] for case in record["cases"]] == ["decode, batch 1", "decode, batch 3", "prefill 40"]
    assert all(len(case["tokens_per_s"]) == 2 and min(case["tokens_per_s"]) > 0 for case in record["cases"])
    assert record["load_s"] > 0
    assert record["memory"]["loaded_bytes"] > 0
    assert record["machine"]["threads"] == 1


def test_engine_as_json_prints_nothing_else(folder, quick_ceilings):
    done = engine(folder, "--batch", "2", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cases"][0]["batch_size"] == 2


def test_an_outlier_is_measured_again_and_said(folder, tmp_path, quick_ceilings, monkeypatch):
    """The second of two rates lies far off, and so does what replaces it at first; the first one is the warm-up."""
    rates = iter([1.0, 100.0, 100.0, 30.0, 20.0, 90.0])
    monkeypatch.setattr(Stopwatch, "measure", lambda self, case, repetition: next(rates))
    out = tmp_path / "results.jsonl"
    done = run("engine", folder, "--threads", "1", "--repeats", "3", "--batch", "1", "--out", str(out))
    assert done.exit_code == 0, done.output
    (case,) = json.loads(out.read_text())["cases"]
    assert (case["tokens_per_s"], case["outliers"]) == ([100.0, 100.0, 90.0], [30.0, 20.0])
    assert "Measured again, far from the others: decode, batch 1, 25.0 (20.0-30.0) tokens/s." in done.stdout


def test_an_interrupted_engine_run_keeps_what_there_is(folder, tmp_path, quick_ceilings, monkeypatch):
    measure = Stopwatch.measure

    def interrupted(self, case, repetition):
        if (case.batch_size, repetition) == (2, 2):
            raise KeyboardInterrupt
        return measure(self, case, repetition)

    monkeypatch.setattr(Stopwatch, "measure", interrupted)
    out = tmp_path / "results.jsonl"
    done = engine(folder, "--batch", "1", "--batch", "2", "--out", str(out))
    assert done.exit_code == 130
    record = json.loads(out.read_text())
    assert not record["is_complete"]
    assert [len(case["tokens_per_s"]) for case in record["cases"]] == [2, 1]
    assert "Interrupted: not all repetitions were made." in done.stdout


@pytest.mark.slow
def test_serve_compares_both_policies(folder, tmp_path):
    out = tmp_path / "results.jsonl"
    done = serve(folder, "--rate", "50", "--rate", "200", "--out", str(out), "--plots", str(tmp_path / "plots"))
    assert done.exit_code == 0, done.output
    for text in ("Requests/s", "Generated tokens/s", "continuous / static", "50 arrivals/s, static", "first token p99"):
        assert text in done.stdout
    records = list(map(json.loads, out.read_text().splitlines()))
    assert [(r["system"], r["rate"]) for r in records] == [
        ("continuous", 50.0),
        ("continuous", 200.0),
        ("static", 50.0),
        ("static", 200.0),
    ]
    for record in records:
        assert record["summary"]["num_failed"] == 0
        assert 0 < record["summary"]["first_token_min_s"] <= record["summary"]["latency_max_s"]
        for what in ("prompt", "new"):
            assert record["requests"][what] == records[0]["requests"][what]
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"serve-latency-50.png", "serve-latency-200.png"}


@pytest.mark.slow
def test_ctrl_c_keeps_finished_runs_and_ends_every_process(folder, tmp_path):
    """The first rate is over in no time, the second would take minutes."""
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "moeflow.cli.main", "bench", "serve", folder, "--threads", "1", "-n", "5"]
    command += ["--max-new", "4", "--rate", "200", "--rate", "0.01", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (out.exists() and out.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.kill(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 130, stderr
    assert "200" in stdout
    assert "Traceback" not in stderr
    assert len(out.read_text().splitlines()) == 1
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--rate", "0"), "0 requests a second make no traffic"),
        (("--rate", "nan"), "nan requests a second"),
        (("--min-new", "9", "--max-new", "3"), "new tokens is to be from 9 to 3"),
        (("--batch-timeout", "-1"), "--batch-timeout must be at least 0"),
        (("--url", "http://127.0.0.1:1"), "MODEL and --url exclude each other"),
        (("-n", "0"), "0 is not in the range"),
        (("--policy", "random"), "'random' is not one of"),
    ],
)
def test_serve_refuses_what_makes_no_sense(folder, args, message):
    done = run("serve", folder, *args)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_serve_refuses_another_machine_and_says_when_nobody_answers():
    done = run("serve", "--url", "http://192.0.2.1:8000")
    assert done.exit_code == 2
    assert "--allow-remote" in done.stderr
    done = run("serve", "--url", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert "no server answers" in done.stderr


def test_plots_without_matplotlib_are_refused_before_anything_runs(folder, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "moeflow.bench.plots", raising=False)
    for name in ("matplotlib", "matplotlib.axes", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    done = serve(folder, "--rate", "100", "--plots", str(tmp_path))
    assert done.exit_code == 1
    assert "pip install 'moeflow[bench]'" in done.stderr


def test_quality_compares_two_formats(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox counts: 1, 2, 3! " * 8)
    out = tmp_path / "results.jsonl"
    some = ("--threads", "1", "--prompts", "2", "--new-tokens", "4", "--text", str(text), "--out", str(out))
    done = run("quality", folder, "--dtype", "bfloat16", *some)
    assert done.exit_code == 0, done.output
    assert "bfloat16" in done.stdout
    record = json.loads(out.read_text())
    assert (record["reference_format"], record["weight_format"], record["text"]) == ("float32", "bfloat16", "text.txt")
    assert abs(record["change_percent"]) < 5
    assert record["num_new_tokens"] == 8


def test_quality_needs_two_formats(folder):
    done = run("quality", folder, "--dtype", "float32")
    assert done.exit_code == 2
    assert "nothing to compare" in done.stderr
