"""Claim: what `moeflow plan` chooses is within 10% of the best that a grid of real runs finds.

One job of many requests runs under the plan, and with every other number of concurrent requests. Points take turns,
round after round; each starts a process of its own, whose loading does not count. Prompts are pieces of text that comes
with the package and that no plan was made from; answers are drawn.

    python -m studies.policy_grid [MODEL] --quantize int8
    python -m studies.policy_grid [MODEL] --memory 1GiB --requests 16 --gen-len 16 --batch 1 --batch 4 --batch 16
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from moeflow.cli.bench.output import result_options
from moeflow.cli.options import byte_count, default_cache_dir
from moeflow.cli.plan.output import short_name
from moeflow.cli.progress import bar
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import CapacityError, EngineError
from moeflow.core.plan import Workload
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.units import format_bytes
from moeflow.engine.engine import Engine
from moeflow.planner.apply_plan import settings_beside
from moeflow.planner.planning import PlanRequest, plan_for
from moeflow.planner.resolve import resolve
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.builtin import ensure_builtin_model
from moeflow.train.routing_learning import other_text
from studies.harness.command import run_study
from studies.harness.interleaved import interleaved
from studies.harness.records import publish

CHOSEN = "as planned"


@dataclasses.dataclass(frozen=True)
class Job:
    """What every point of the grid runs."""

    num_requests: int
    prompt_len: int
    gen_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the rate counts."""
        return self.num_requests * self.gen_len


def run(settings: Settings, job: Job) -> float:
    """Return generated tokens a second, prompts included in the time, in a process of its own, whose memory is its own.

    Raises: CapacityError if it does not fit.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_run, settings, job).result()


def _run(settings: Settings, job: Job) -> float:
    engine = Engine.load(resolve(settings).config)
    try:
        text = other_text(Tokenizer.load(str(settings.model)))
        _answer(engine, dataclasses.replace(job, gen_len=2), text)  # work done only once is not counted
        start = time.perf_counter()
        _answer(engine, job, text)
        return job.num_tokens / (time.perf_counter() - start)
    finally:
        engine.close()


def _answer(engine: Engine, job: Job, text: Sequence[int]) -> None:
    rng = random.Random(0)
    sampling = SamplingParams(max_tokens=job.gen_len, temperature=1.0, ignore_eos=True)
    for index in range(job.num_requests):
        start = rng.randrange(len(text) - job.prompt_len)
        prompt = list(text[start : start + job.prompt_len])
        engine.submit(Submission(str(index), prompt, sampling, seed=index))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise EngineError(output.error)


def points(planned: Settings, batches: Sequence[int]) -> Iterator[tuple[str, Settings]]:
    """Yield each point of the grid, the plan among them: (name, settings)."""
    yield CHOSEN, planned
    chosen, tokens = resolve(planned).config, planned.max_num_batched_tokens or 512
    for size in batches:
        name = f"{size} together"
        settings = dataclasses.replace(
            planned, max_num_seqs=size, kv_cache_bytes=None, max_num_batched_tokens=max(tokens, size)
        )
        try:
            if resolve(settings).config != chosen:
                yield name, settings
        except CapacityError as error:
            print(f"{name}: {error}", file=sys.stderr)


@click.command()
@click.argument("model", required=False)
@click.option("--quantize", type=click.Choice(["int8", "int4"]))
@click.option("--memory", "memory_bytes", callback=byte_count, help="Limit of RAM.")
@click.option("--requests", default=64, show_default=True)
@click.option("--prompt-len", default=96, show_default=True)
@click.option("--gen-len", default=32, show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 4, 8, 16, 32, 64), show_default=True)
@click.option("--rounds", default=2, show_default=True)
@result_options
def main(model: str | None, rounds: int, as_json: bool, out: Path | None, **given: Any) -> None:
    """Run a job as planned and with other numbers of concurrent requests."""
    job = Job(given.pop("requests"), given.pop("prompt_len"), given.pop("gen_len"))
    batches = given.pop("batches")
    cache_dir = default_cache_dir()
    asked = Settings(model=model or str(ensure_builtin_model(cache_dir)), cache_dir=cache_dir, **given)
    workload = Workload(prompt_len=job.prompt_len, gen_len=job.gen_len, max_prompt_len=job.prompt_len)
    usage = Usage(workload=workload, num_requests=job.num_requests, reserves_kv=True)
    plan = plan_for(PlanRequest(settings=asked, usage=usage)).plan
    assert plan.forecast is not None, "this machine is measured"
    num_tokens = plan.config.scheduler.max_num_batched_tokens
    own = {"cache_dir": cache_dir, "prefix_caching": False, "max_num_batched_tokens": num_tokens}
    planned = settings_beside(plan, own)
    grid = list(points(planned, batches))
    rates: dict[str, list[float]] = {}
    with bar(rounds * len(grid)) as shown:
        for _, (point, settings) in interleaved(grid, rounds):
            shown.say(point)
            rates.setdefault(point, []).append(run(settings, job))
            shown.advance()
    publish(
        "policy_grid",
        table,
        out,
        as_json=as_json,
        threads=plan.config.num_threads,
        model=short_name(plan.config.model_path),
        weight_format=plan.config.weight_format,
        memory_bytes=asked.memory_bytes,
        job=dataclasses.asdict(job),
        planned=dataclasses.asdict(plan.forecast.policy),
        predicted_tokens_per_s=plan.forecast.tokens_per_s.value,
        tokens_per_s=rates,
    )


def share_of_best(record: Record) -> float:
    """Return the plan's rate as a share of the best point's."""
    medians = {point: statistics.median(rates) for point, rates in record["tokens_per_s"].items()}
    return medians[CHOSEN] / max(medians.values())


def table(record: Record) -> Table:
    """Return all points of a grid, best first."""
    medians = {point: statistics.median(rates) for point, rates in record["tokens_per_s"].items()}
    best = max(medians.values())
    rows = [
        (point, spread_text(record["tokens_per_s"][point]), f"{medians[point] / best:.1%}")
        for point in sorted(medians, key=lambda one: -medians[one])
    ]
    num_together, job = record["planned"]["batch_size"], record["job"]
    note = f"Planned: {num_together} together; expected {record['predicted_tokens_per_s']:.1f} tokens/s."
    within = f" within {format_bytes(record['memory_bytes'])}" if record["memory_bytes"] else ""
    title = (
        f"The plan against a grid, generated tokens/s: {record['model']}, {record['weight_format']}{within}; "
        f"{job['num_requests']} prompts of {job['prompt_len']}, {job['gen_len']} new"
    )
    return Table(title, ("", "median (min-max)", "of the best"), tuple(rows), (note,))


if __name__ == "__main__":
    run_study(main)
