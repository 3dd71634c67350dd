"""`bench batch` as a whole: the time of a job of many requests, padded and not, and its effect on interactive ones.

Each system has an engine in a process of its own, started anew for every repetition. Systems run alternately, so that a
drift of the machine hits all alike. Jobs are submitted as batch jobs are, with batch priority.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from moeflow.bench.metrics import Served, summarize
from moeflow.bench.replay import EngineTarget, replay
from moeflow.bench.serve_run import NUM_WARM_UP, SHUTDOWN_S, RunCalls, describe
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError, EngineError
from moeflow.processes.process_client import ProcessEngine
from moeflow.text.tokenizer import Tokenizer
from moeflow.workload.offline import make_job
from moeflow.workload.poisson import WorkloadSpec, make_arrivals

SYSTEMS = {"continuous": "variable length", "static": "padded"}  # what policies are called here


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job to measure with."""

    name: str
    prompt_lengths: Sequence[int]
    num_new: int
    seed: int

    def describe(self) -> dict[str, Any]:
        """Return what a record has of it."""
        return {
            "name": self.name,
            "num_requests": len(self.prompt_lengths),
            "num_new": self.num_new,
            "mean_prompt": round(statistics.fmean(self.prompt_lengths), 1),
            "longest_prompt": max(self.prompt_lengths),
            "seed": self.seed,
        }


def question_lengths(config: EngineConfig, questions: Sequence[str]) -> list[int]:
    """Return how many tokens each question has for the model."""
    tokenizer = Tokenizer.load(config.model_path)
    return [len(tokenizer.encode(question)) for question in questions]


async def run_batch_job(
    config: EngineConfig, job: BatchJob, vocab_size: int, repetition: int, progress: RunCalls
) -> None:
    """Measure how fast one system answers a job.

    Raises: ConfigError if a request could never run; EngineError if one fails; what starting an engine raises.
    """
    check_length(config, max(job.prompt_lengths) + job.num_new)
    engine = await ProcessEngine.start(config, on_progress=progress.on_bytes)
    try:
        target = EngineTarget(engine, is_batch=True)
        await replay(target, make_job(job.prompt_lengths[:NUM_WARM_UP], 4, vocab_size, seed=-1), lambda: None)
        progress.on_run(f"{job.name}, {SYSTEMS[config.scheduler.policy]}")
        arrivals = make_job(job.prompt_lengths, job.num_new, vocab_size, job.seed + repetition)
        served = await replay(target, arrivals, lambda: None)
        _check(served)
        preemptions = engine.stats().preemptions_total
    finally:
        await engine.shutdown(SHUTDOWN_S)
    progress.on_result(
        {
            **describe(config),
            "measured": "job",
            "model": config.model_name,
            "system": SYSTEMS[config.scheduler.policy],
            "repetition": repetition,
            "workload": job.describe(),
            "summary": summarize(served),
            "preemptions": preemptions,
        }
    )


async def run_beside(
    config: EngineConfig, job: BatchJob, traffic: WorkloadSpec, repetition: int, progress: RunCalls
) -> None:
    """Measure a job alone, the same with interactive requests, and those alone, in one engine.

    The job has to last as long as the traffic: its requests are repeated until it does. It is measured from its first
    complete answer on, when as many requests as fit are at work on it.

    Raises: ConfigError if a request could never run; EngineError if one fails; what starting an engine raises.
    """
    check_length(config, max(max(job.prompt_lengths) + job.num_new, traffic.max_total))
    arrivals = make_arrivals(traffic)
    engine = await ProcessEngine.start(config, on_progress=progress.on_bytes)
    try:
        await replay(EngineTarget(engine), arrivals[:NUM_WARM_UP], lambda: None)
        feed = _Feed(engine, job, traffic.vocab_size, config.scheduler.max_num_seqs)
        job_alone = job_beside = (0, 0.0)
        together: list[Served] = []

        async def answer() -> None:
            together.extend(await replay(EngineTarget(engine), arrivals, lambda: None))

        async def measure() -> None:
            nonlocal job_alone, job_beside
            await feed.first_answer.wait()
            job_alone = await feed.tokens_during(asyncio.sleep(traffic.num_requests / traffic.rate))
            progress.on_run("both")
            job_beside = await feed.tokens_during(answer())

        progress.on_run("the job alone")
        await feed.run_beside(measure())
        progress.on_run("interactive requests alone")
        alone = await replay(EngineTarget(engine), arrivals, lambda: None)
    finally:
        await engine.shutdown(SHUTDOWN_S)
    _check([*alone, *together])
    progress.on_result(
        {
            **describe(config),
            "measured": "beside",
            "model": config.model_name,
            "repetition": repetition,
            "workload": job.describe(),
            "rate": traffic.rate,
            "interactive_alone": _times(alone),
            "interactive_beside_job": _times(together),
            "job_alone": {"tokens": job_alone[0], "seconds": job_alone[1]},
            "job_beside_interactive": {"tokens": job_beside[0], "seconds": job_beside[1]},
        }
    )


def _times(served: Sequence[Served]) -> dict[str, list[float]]:
    """Return each request's timings, in order of arrival, so that repetitions can be combined."""
    return {
        "first_token_s": [each.first_token_s for each in served if each.first_token_s is not None],
        "per_token_s": [each.per_token_s for each in served if each.per_token_s is not None],
    }


class _Feed:
    """A job without end: as many requests in the engine as a batch job would have there."""

    def __init__(self, engine: ProcessEngine, job: BatchJob, vocab_size: int, max_num_seqs: int) -> None:
        self._target = EngineTarget(engine, is_batch=True)
        self._job = job
        self._vocab_size = vocab_size
        self._width = 4 * max_num_seqs
        self._num_made = 0
        self._num_tokens = 0
        self.first_answer = asyncio.Event()

    async def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the job until `work` is done. Raises: what a request of the job, or `work`, raises."""
        lanes = [asyncio.create_task(self._repeat()) for _ in range(self._width)]
        working = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait((working, *lanes), return_when=asyncio.FIRST_COMPLETED)
            for task in done:  # a lane ends by an error only
                task.result()
        finally:
            for task in (working, *lanes):
                task.cancel()
            await asyncio.gather(working, *lanes, return_exceptions=True)

    async def tokens_during(self, work: Coroutine[Any, Any, None]) -> tuple[int, float]:
        """Return how many tokens of the job came while `work` was done, and the seconds that it took."""
        loop = asyncio.get_running_loop()
        start_s, num_before = loop.time(), self._num_tokens
        await work
        return self._num_tokens - num_before, loop.time() - start_s

    async def _repeat(self) -> None:
        while True:
            async for count in self._next():
                self._num_tokens += count
            self.first_answer.set()

    def _next(self) -> AsyncGenerator[int, None]:
        self._num_made += 1
        length = self._job.prompt_lengths[self._num_made % len(self._job.prompt_lengths)]
        (arrival,) = make_job([length], self._job.num_new, self._vocab_size, seed=self._num_made)
        return self._target.generate(f"job-{self._num_made}", arrival)


def check_length(config: EngineConfig, num_tokens: int) -> None:
    """Raises: ConfigError if the engine would refuse a request of so many tokens."""
    if num_tokens > config.scheduler.max_model_len:
        raise ConfigError(
            f"requests have up to {num_tokens} tokens, but the engine allows {config.scheduler.max_model_len}: "
            "lower --new, or raise --max-model-len"
        )


def _check(served: Sequence[Served]) -> None:
    for each in served:
        if each.error is not None:
            raise EngineError(each.error)
