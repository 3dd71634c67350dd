"""A server's engines in a process that follows a test's commands: one line of JSON for each command and answer.

Run as `python -m tests.engine.ranks.ray_server`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

from moeflow.core.engine_messages import Submission
from moeflow.core.errors import MoeflowError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineState
from moeflow.engine.generator import Generator
from moeflow.planner.resolve import resolve
from moeflow.processes.cluster import ray_launcher
from moeflow.processes.supervisor import Supervisor
from moeflow.server.config import ServerConfig
from moeflow.server.jobs.journal import ResultJournal
from moeflow.server.jobs.lines import scan
from moeflow.server.jobs.runner import run_job
from moeflow.server.service import Service
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer

NUM_TOKENS = 300


def asked(prompts) -> list[Submission]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [Submission(str(number), prompt, sampling, seed=0) for number, prompt in enumerate(prompts)]


def say(**what) -> None:
    print(json.dumps(what), flush=True)


async def ask(supervisor: Supervisor, prompts) -> None:
    """Answer prompts; report once every one has tokens."""
    begun: set[str] = set()

    async def read(each: Submission):
        tokens = []
        async for output in supervisor.stream(each):
            tokens += output.token_ids
            if each.request_id not in begun:
                begun.add(each.request_id)
                if len(begun) == len(prompts):
                    say(begun=True)
        return tokens

    tokens = await asyncio.gather(*(read(each) for each in asked(prompts)))
    stats = supervisor.stats()
    ready = sum(each.state is EngineState.READY for each in supervisor.replicas())
    hosts = [rank.host for rank in stats.ranks]
    say(tokens=tokens, restarts=stats.engine_restarts_total, hosts=hosts, ready=ready)


async def run_batch(supervisor: Supervisor, source: Path) -> None:
    """Run a batch job, and report once some of it is done."""
    service = Service(ServerConfig())
    service.attach(Generator(supervisor, Tokenizer.load(supervisor.model.path)))
    files = source.with_suffix(".out"), source.with_suffix(".err")
    result_ids = scan(source, max_line_bytes=1 << 20).result_ids
    with ResultJournal(*files, result_ids, supervisor.model.name) as journal:
        running = asyncio.create_task(run_job(service, source, journal, 1 << 20))
        while len(journal.done) < len(result_ids) / 4:
            await asyncio.sleep(0.01)
        say(begun=True)
        await running
        journal.put_in_order()
        say(completed=journal.totals.completed)


async def serve() -> None:
    supervisor: Supervisor | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        match json.loads(line):
            case {"start": settings, "patience_s": patience_s}:
                ray_launcher.PLACEMENT_S = patience_s
                settings["cache_dir"] = Path(settings["cache_dir"])
                try:
                    plan = resolve(Settings(is_served=True, **settings)).plan
                    supervisor = await Supervisor.start(plan.config, nodes=plan.node_replicas)
                    say(error="")
                except MoeflowError as error:
                    say(error=f"{type(error).__name__}: {error}")
            case {"ask": prompts}:
                assert supervisor is not None
                await ask(supervisor, prompts)
            case {"batch": source}:
                assert supervisor is not None
                await run_batch(supervisor, Path(source))
            case {"scale": number}:
                assert supervisor is not None
                supervisor.scale(number)
                say(error="")
            case {"stop": _}:
                assert supervisor is not None
                await supervisor.shutdown(5)
                say(error="")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve())
