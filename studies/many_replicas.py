"""Claim: 100 and 1,000 replicas bring at least 90% of as many times one, on the virtual clock.

    python -m studies.many_replicas --out FILE

The dispatch rule and the schedulers are the ones of a server. A pass takes a fixed time, and some for each token. All
requests are there from the start. Speed counts until the last request has begun: afterwards engines run empty, however
many there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.batch import Batch
from moeflow.core.engine_config import SchedulerConfig
from moeflow.planner.simulator.serve_run import serve_virtually
from moeflow.workload.poisson import WorkloadSpec, make_arrivals
from studies.harness.command import run_study
from studies.harness.records import publish

SEATS = 8
PASS_S, TOKEN_S = 0.02, 1e-4


def pass_seconds(batch: Batch) -> float:
    """Return how long a pass takes."""
    return PASS_S + TOKEN_S * batch.num_tokens


def tokens_per_s(num_replicas: int, requests_each: int, seed: int) -> float:
    """Return the speed while requests wait."""
    number = num_replicas * requests_each
    spec = WorkloadSpec(rate=1e6, num_requests=number, max_prompt=200, max_new=100, vocab_size=1000, seed=seed)
    config = SchedulerConfig(
        block_size=16, num_blocks=400, max_model_len=spec.max_total, max_num_seqs=SEATS, max_num_batched_tokens=512
    )
    served = serve_virtually(make_arrivals(spec), config, pass_seconds, num_replicas)
    until_s = max(one.first_s for one in served)
    num_tokens = 0.0
    for one in served:  # tokens of a request come at about equal distances
        share = 1.0 if one.end_s <= until_s else (until_s - one.first_s) / (one.end_s - one.first_s)
        num_tokens += share * one.arrival.num_new
    return num_tokens / until_s


def measure(numbers: Sequence[int], requests_each: int, seed: int) -> list[dict[str, Any]]:
    """Return speeds, relative to one engine's, and how long the simulation took."""
    one = tokens_per_s(1, 50 * requests_each, seed)
    cases = []
    for number in numbers:
        begun_s = time.process_time()
        speed = tokens_per_s(number, requests_each, seed)
        cases.append(
            {
                "replicas": number,
                "tokens_per_s": round(speed, 1),
                "share": round(speed / (number * one), 4),
                "simulated_in_s": round(time.process_time() - begun_s, 1),
            }
        )
    return cases


def table(record: Record) -> Table:
    """Return the cases."""
    rows = [
        (str(it["replicas"]), f"{it['tokens_per_s']:.0f}", f"{it['share']:.1%}", f"{it['simulated_in_s']:.0f} s")
        for it in record["cases"]
    ]
    title = f"Replicas on the virtual clock, {record['requests_each']} requests for each"
    return Table(title, ("replicas", "tokens/s", "of as many times one", "processor time"), tuple(rows))


@click.command(help=__doc__)
@click.option("--replicas", "numbers", multiple=True, type=int, default=(10, 100, 1000), show_default=True)
@click.option("--requests", "requests_each", default=40, show_default=True, help="For each replica.")
@click.option("--seed", default=0, show_default=True)
@result_options
def main(numbers: Sequence[int], requests_each: int, seed: int, as_json: bool, out: Path | None) -> None:
    """Simulate all numbers."""
    cases = measure(numbers, requests_each, seed)
    publish("many_replicas", table, out, as_json=as_json, seed=seed, requests_each=requests_each, cases=cases)


if __name__ == "__main__":
    run_study(main)
