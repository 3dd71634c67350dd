"""`moeflow bench batch` as a user runs it: the order of measurements, the records, and refusals."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from moeflow.bench.serve_run import describe
from moeflow.cli import lazy
from moeflow.cli.main import main
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, max_position_embeddings=4096)
    return str(folder)


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"turns": ["What " * n]}) + "\n" for n in (1, 5)))
    return str(file)


def run(*args: str):
    return CliRunner().invoke(main, ["bench", "batch", *args])


@pytest.fixture
def measured(monkeypatch):
    """Take down what would be measured instead of measuring it."""
    jobs = []
    summary = {"tokens_per_s": 10.0, "requests_per_s": 1.0, "num_requests": 2, "per_token_p99_s": 0.1}

    async def run_batch_job(config, job, vocab_size, repetition, progress):
        progress.on_bytes(1, 2)
        progress.on_run(job.name)
        jobs.append((config.scheduler.policy, job, repetition))
        system = "padded" if config.scheduler.policy == "static" else "variable length"
        progress.on_result(
            describe(config)
            | {"measured": "job", "model": "tiny", "system": system, "repetition": repetition}
            | {"workload": job.describe(), "summary": summary, "preemptions": 0}
        )

    async def run_beside(config, job, traffic, repetition, progress):
        jobs.append((traffic, job, repetition))
        raise KeyboardInterrupt

    monkeypatch.setattr(lazy, "run_batch_job", run_batch_job, raising=False)
    monkeypatch.setattr(lazy, "run_beside", run_beside, raising=False)
    return jobs


def test_help_has_examples():
    assert re.search(r"Examples:\n +moeflow bench batch", run("--help").output)


def test_each_workload_and_length_is_measured_with_both_policies_in_turns(folder, questions, measured, tmp_path):
    out = tmp_path / "records.jsonl"
    chosen = ("--workload", "reasoning", "--questions", questions, "--workload", "mtbench")
    done = run(folder, *chosen, "-n", "5", "--new", "3", "--new", "4", "--repeats", "2", "--out", str(out))
    assert done.exit_code == 0, done.stderr
    assert [(job.name, job.num_new, repetition, policy) for policy, job, repetition in measured] == [
        (name, num_new, repetition, policy)
        for name in ("reasoning", "mtbench")
        for num_new in (3, 4)
        for repetition in (0, 1)
        for policy in ("continuous", "static")
    ]
    assert {len(job.prompt_lengths) for _, job, _ in measured} == {5}
    asked = {length for _, job, _ in measured if job.name == "mtbench" for length in job.prompt_lengths}
    assert len(asked) == 2  # two questions, taken again and again
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == len(measured)
    assert {record["kind"] for record in records} == {"batch"}
    assert "variable length" in done.stdout


def test_lengths_of_answers_are_the_papers_unless_said(folder, questions, measured):
    assert run(folder, "--questions", questions, "-n", "2", "--policy", "continuous").exit_code == 0
    assert run(folder, "--workload", "reasoning", "-n", "2", "--policy", "continuous").exit_code == 0
    assert run(folder, "--workload", "summarization", "-n", "2", "--policy", "continuous").exit_code == 0
    assert [(job.name, job.num_new) for _, job, _ in measured] == [
        ("mtbench", 128),
        ("reasoning", 50),
        ("summarization", 64),
    ]


def test_records_for_programs(folder, measured):
    done = run(folder, "-n", "3", "--policy", "static", "--policy", "static", "--json")
    (record,) = map(json.loads, done.stdout.splitlines())
    assert (record["system"], record["workload"]["num_requests"], record["seed"]) == ("padded", 3, 0)


def test_stopped_it_shows_what_it_has(folder, measured):
    done = run(folder, "-n", "3", "--interactive-rate", "0.5", "--interactive-requests", "7", "--seed", "4")
    assert done.exit_code == 130
    ((traffic, _, _),) = measured
    assert (traffic.rate, traffic.num_requests, traffic.seed) == (0.5, 7, 4)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--workload", "mtbench"), "--workload mtbench needs --questions, and vice versa"),
        (("--questions", "QUESTIONS", "--workload", "reasoning"), "and vice versa"),
        (("--questions", "nowhere.jsonl"), "does not exist"),
        (("--workload", "chat"), "is not one of 'reasoning', 'summarization', 'mtbench'"),
        (("--policy", "greedy"), "is not one of 'continuous', 'static'"),
        (("--interactive-rate", "0"), "0 requests a second make no traffic"),
        (("--interactive-rate", "nan"), "nan requests a second make no traffic"),
        (("-n", "0"), "0 is not in the range"),
        (("--new", "0"), "0 is not in the range"),
        (("--repeats", "0"), "0 is not in the range"),
        (("--out", "nowhere/x.jsonl"), "does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_loads(questions, measured, args, reason):
    done = run("./no/model", *(questions if arg == "QUESTIONS" else arg for arg in args))
    assert (done.exit_code, reason in done.stderr) == (2, True), done.stderr
    assert measured == []


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b"no json\n", b'{"turns": []}\n', b'{"turns": [7]}\n', b'{"turns": [""]}', b"\xff"]
)
def test_questions_that_are_none(folder, tmp_path, measured, content):
    file = tmp_path / "questions.jsonl"
    file.write_bytes(content)
    done = run(folder, "--questions", str(file))
    assert (done.exit_code, str(file) in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_a_small_job_for_real(folder):
    done = run(folder, "--workload", "reasoning", "-n", "4", "--new", "2", "--threads", "1", "--max-num-seqs", "2")
    assert done.exit_code == 0, done.stderr
    assert "padded" in done.stdout
