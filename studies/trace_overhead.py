"""Claim: spans of passes cost less than 1% of a decode pass, also where experts come from disk.

One engine, which records every other pass, in the order on, off, off, on. It switches between passes, as it does when
somebody looks. The first passes, which fill the slots, do not count.

    python -m studies.trace_overhead
    python -m studies.trace_overhead --memory 900MiB
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.cli.options import byte_count, default_cache_dir
from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.units import format_bytes
from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import ModelRunner
from moeflow.engine.runner_loading import load_runner
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.train.builtin import ensure_builtin_model
from studies.harness.command import run_study
from studies.harness.records import publish

NUM_FIRST = 40


def measure(engine: Engine, runner: ModelRunner) -> dict[bool, list[float]]:
    """Return the seconds of passes with and without recording."""
    runner.recording(1)  # begins the first time
    tracing = runner._tracing
    assert tracing is not None
    times: dict[bool, list[float]] = {True: [], False: []}
    number = 0
    while engine.has_work:
        is_traced = number // 2 % 2 == number % 2
        tracing.switch(is_on=is_traced)
        start = time.perf_counter()
        engine.step()
        if number >= NUM_FIRST:
            times[is_traced].append(time.perf_counter() - start)
        number += 1
    runner.end_recording()
    return times


@click.command()
@click.option("--memory", callback=byte_count, help="Limit.  [default: none, all experts are in memory]")
@click.option("--tokens", default=900, show_default=True, help="Tokens to generate.")
@result_options
def main(memory: int | None, tokens: int, as_json: bool, out: Path | None) -> None:
    """Compare passes with and without a trace."""
    cache_dir = default_cache_dir()
    settings = Settings(
        model=str(ensure_builtin_model(cache_dir)),
        cache_dir=cache_dir,
        memory_bytes=memory,
        max_model_len=tokens + 64,
        max_num_seqs=1,
    )
    config = resolve(settings).config
    runner = load_runner(config)
    engine = Engine(config, runner)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine.submit(Submission("a", list(range(100, 140)), sampling, seed=0))
    times = measure(engine, runner)
    rate = engine.stats().expert_hit_rate
    engine.close()
    publish(
        "trace_overhead",
        table,
        out,
        as_json=as_json,
        threads=config.num_threads,
        model=config.model_name,
        weight_format=config.weight_format,
        memory_bytes=memory or 0,
        hit_rate=rate,
        traced_s=times[True],
        plain_s=times[False],
    )


def table(record: Record) -> Table:
    """Compare passes with and without a trace."""
    traced, plain = (statistics.median(record[name]) * 1e3 for name in ("traced_s", "plain_s"))
    rows = (("traced", f"{traced:.3f}", f"{traced / plain - 1:+.2%}"), ("not traced", f"{plain:.3f}", ""))
    title = f"Decode passes with `--trace`: {record['model']}, {record['weight_format']}"
    numbers = f"Medians of {len(record['traced_s'])} and {len(record['plain_s'])} passes of one process"
    note = f"{numbers}, in turns; all experts were in memory."
    if record["memory_bytes"]:
        hits = f"{record['hit_rate']:.1%} of experts were in memory"
        note = f"{numbers} within {format_bytes(record['memory_bytes'])}, in turns; {hits}."
    return Table(title, ("", "ms", "more"), rows, (note,))


if __name__ == "__main__":
    run_study(main)
