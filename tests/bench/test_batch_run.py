"""`bench batch` runs its jobs on a scripted engine, and once on a real one."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from moeflow.bench import batch_run
from moeflow.bench.batch_run import BatchJob, check_length, question_lengths, run_batch_job, run_beside
from moeflow.bench.serve_run import RunCalls, with_policy
from moeflow.core.engine_messages import EngineStats, TokenOutput
from moeflow.core.errors import ConfigError, EngineError
from moeflow.core.request import FinishReason
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.workload.poisson import WorkloadSpec, make_arrivals
from tests.patience import PATIENCE_S
from tests.tiny_mixtral import write_tiny_mixtral

JOB = BatchJob("made up", (4, 9, 5, 6, 7, 8), num_new=3, seed=5)
TRAFFIC = WorkloadSpec(rate=200.0, num_requests=6, max_prompt=9, max_new=4, vocab_size=258)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return resolve(
        Settings(model=str(folder), num_threads=1, max_num_seqs=2, max_num_batched_tokens=32, prefix_caching=False)
    ).config


class ToldEngine:
    """Answers at once or fails on demand, and records its requests."""

    def __init__(self) -> None:
        self.asked = []
        self.dies_after = 10**9  # requests
        self.error: str | None = None
        self.is_shut_down = False

    async def stream(self, submission):
        self.asked.append(submission)
        if len(self.asked) > self.dies_after:
            raise EngineError("the engine process died")
        for number in range(submission.sampling.max_tokens):
            await asyncio.sleep(0.0005)
            is_last = number + 1 == submission.sampling.max_tokens
            yield TokenOutput(
                request_id=submission.request_id,
                token_ids=[1],
                finish_reason=FinishReason.LENGTH if is_last else None,
                error=self.error,
            )

    def stats(self) -> EngineStats:
        return EngineStats(preemptions_total=7)

    async def shutdown(self, deadline_s: float) -> None:
        self.is_shut_down = True


@pytest.fixture
def engine(monkeypatch) -> ToldEngine:
    engine = ToldEngine()

    class Starter:
        @staticmethod
        async def start(config, on_progress):
            on_progress(1, 1)
            return engine

    monkeypatch.setattr(batch_run, "ProcessEngine", Starter)
    return engine


def progress(results: list, said: list) -> RunCalls:
    return RunCalls(lambda done, total: None, said.append, results.append)


def run(coroutine) -> None:
    """Run it, but not for ever."""

    async def in_time() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await coroutine

    asyncio.run(in_time())


def test_a_job_is_measured_with_batch_priority_after_a_warm_up(config, engine):
    results, said = [], []
    run(run_batch_job(config, JOB, 258, 1, progress(results, said)))
    (record,) = results
    assert [len(each.prompt_token_ids) for each in engine.asked] == [4, 9, 5, 6, *JOB.prompt_lengths]
    assert all(each.is_batch for each in engine.asked)
    assert [each.sampling.max_tokens for each in engine.asked] == [4] * 4 + [3] * 6
    assert (record["measured"], record["system"], record["repetition"]) == ("job", "variable length", 1)
    assert (record["summary"]["num_requests"], record["summary"]["num_failed"], record["preemptions"]) == (6, 0, 7)
    assert record["workload"] == {
        "name": "made up", "num_requests": 6, "num_new": 3, "mean_prompt": 6.5, "longest_prompt": 9, "seed": 5,
    }  # fmt: skip
    assert said == ["made up, variable length"]
    assert engine.is_shut_down


def test_repetitions_have_other_requests(config, engine):
    for repetition in (0, 1, 0):
        run(run_batch_job(config, JOB, 258, repetition, progress([], [])))
    first, second, third = (
        [each.prompt_token_ids for each in engine.asked[start + 4 : start + 10]] for start in (0, 10, 20)
    )
    assert first == third != second


def test_the_padded_system_says_so(config, engine):
    results = []
    static = with_policy(config, "static", max_prompt=9, batch_timeout_s=0.05)
    run(run_batch_job(static, JOB, 258, 0, progress(results, [])))
    assert results[0]["system"] == "padded"


def test_beside_interactive_requests_the_job_lasts_as_long_as_they_do(config, engine):
    results, said = [], []
    run(run_beside(config, JOB, TRAFFIC, 0, progress(results, said)))
    (record,) = results
    assert said == ["the job alone", "both", "interactive requests alone"]
    assert (record["measured"], record["rate"]) == ("beside", 200.0)
    num_longer = sum(arrival.num_new > 1 for arrival in make_arrivals(TRAFFIC))
    for part in ("interactive_alone", "interactive_beside_job"):
        assert (len(record[part]["first_token_s"]), len(record[part]["per_token_s"])) == (6, num_longer)
        assert all(value > 0 for values in record[part].values() for value in values)
    assert record["job_alone"]["tokens"] > 0
    assert record["job_beside_interactive"]["tokens"] > 0
    assert record["job_alone"]["seconds"] >= 6 / 200.0
    quiet = [each.request_id for each in engine.asked if not each.is_batch]
    assert len(quiet) == 4 + 6 + 6  # a warm-up, beside, alone
    asked = [each.request_id for each in engine.asked]
    assert asked.index("bench-0", 4) > 4 + 4 * 2  # the job's window first, and at least an answer of it
    assert len({each.request_id for each in engine.asked if each.is_batch}) > 4 * 2  # repeated
    assert engine.is_shut_down


@pytest.mark.parametrize("dies_after", [4, 20])
def test_an_engine_that_dies_beside_a_job_ends_the_measurement(config, engine, dies_after):
    """Before the job's first token, and in the middle: the failure is reported, and no caller waits for ever."""
    engine.dies_after = dies_after
    results = []
    with pytest.raises(EngineError, match="died"):
        run(run_beside(config, JOB, TRAFFIC, 0, progress(results, [])))
    assert results == []
    assert engine.is_shut_down


def test_a_request_that_fails_is_no_result(config, engine):
    engine.error = "out of memory"
    results = []
    with pytest.raises(EngineError, match="out of memory"):
        run(run_batch_job(config, JOB, 258, 0, progress(results, [])))
    assert results == []
    assert engine.is_shut_down


def test_requests_beyond_the_context_are_refused_before_anything_starts(config):
    check_length(config, 512)
    for start in (
        run_batch_job(config, BatchJob("long", (500,), 13, 0), 258, 0, progress([], [])),
        run_beside(config, BatchJob("long", (500,), 13, 0), TRAFFIC, 0, progress([], [])),
    ):
        with pytest.raises(ConfigError, match="up to 513 tokens, but the engine allows 512: lower --new"):
            asyncio.run(start)


def test_questions_have_the_lengths_that_the_model_sees(config):
    short, long = question_lengths(config, ["Why?", "Why? " * 10])
    assert short < long
    assert long >= 40  # bytes are tokens here


@pytest.mark.slow
def test_a_job_beside_others_on_an_engine_that_computes(config):
    before = set(psutil.Process().children(recursive=True))
    results = []
    asyncio.run(run_beside(config, JOB, TRAFFIC, 0, progress(results, [])))
    assert results[0]["job_alone"]["tokens"] > 0
    assert set(psutil.Process().children(recursive=True)) <= before
