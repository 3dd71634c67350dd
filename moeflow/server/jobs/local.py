"""A batch job of the shell: an engine of its own, one input file, and results next to it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflow.core.errors import ConfigError
from moeflow.core.plan import Plan
from moeflow.engine.client import EngineState
from moeflow.engine.generator import Generator
from moeflow.processes.supervisor import Supervisor
from moeflow.server.config import ServerConfig
from moeflow.server.jobs.journal import ResultJournal
from moeflow.server.jobs.lines import MAX_PROBLEMS, parse_line, read_lines, scan
from moeflow.server.jobs.runner import run_job
from moeflow.server.service import Service
from moeflow.text.tokenizer import Tokenizer

WATCH_S = 0.25


@dataclass(frozen=True, slots=True)
class JobState:
    """How far a job is."""

    num_done: int  # failed ones included
    num_failed: int
    total: int
    generated_tokens: int  # since the start
    tokens_per_s: float  # over the last few seconds
    num_ready: int  # replicas
    num_replicas: int


def check_input(source: Path) -> dict[str, str]:
    """Return the ids of an input file's results, by custom_id.

    Raises: ConfigError if lines are no requests, naming each; OSError.
    """
    if not source.is_file():
        raise ConfigError(f"{source} is no regular file; the input is read more than once: write it to a file first")
    found = scan(source, max_line_bytes=ServerConfig().max_body_bytes)
    if found.problems:
        told = "\n".join(f"  line {problem.line}: {problem.message}" for problem in found.problems)
        more = f"\n  (the first {MAX_PROBLEMS}; there may be more)" if len(found.problems) == MAX_PROBLEMS else ""
        raise ConfigError(f"{source} cannot be run; nothing was:\n{told}{more}")
    return found.result_ids


def read_bodies(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the body of each request of a checked input file. Raises: OSError."""
    with source.open("rb") as file:
        for number, raw in read_lines(file, ServerConfig().max_body_bytes):
            yield parse_line(number, raw).body


async def answer_file(
    plan: Plan,
    source: Path,
    journal: ResultJournal,
    total: int,
    *,
    on_loading: Callable[[int, int], None],
    on_state: Callable[[JobState], None],
) -> JobState:
    """Load the model and answer all requests that are not done. SIGTERM cancels it as Ctrl-C does.

    Raises: what loading raises; EngineError if the engine dies for good; OSError if results cannot be written. The
    journal is good to go on with in each case.
    """
    task = asyncio.current_task()
    assert task is not None, "called as a coroutine"
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, plan.config.model_path)
        engine = await Supervisor.start(
            plan.config, plan.num_replicas, nodes=plan.node_replicas, on_progress=on_loading
        )
        try:
            service = Service(ServerConfig())
            service.attach(Generator(engine, tokenizer))
            watching = asyncio.create_task(_watch(engine, journal, total, on_state))
            try:
                await run_job(service, source, journal, service.config.max_body_bytes)
            finally:
                watching.cancel()
            return _state(engine, journal, total)
        finally:
            await engine.shutdown(0)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _watch(engine: Supervisor, journal: ResultJournal, total: int, on_state: Callable[[JobState], None]) -> None:
    while True:
        on_state(_state(engine, journal, total))
        await asyncio.sleep(WATCH_S)


def _state(engine: Supervisor, journal: ResultJournal, total: int) -> JobState:
    stats, replicas = engine.stats(), engine.replicas()
    return JobState(
        num_done=len(journal.done),
        num_failed=journal.totals.failed,
        total=total,
        generated_tokens=stats.generated_tokens_total,
        tokens_per_s=stats.tokens_per_second,
        num_ready=sum(replica.state is EngineState.READY for replica in replicas),
        num_replicas=len(replicas),
    )
