"""`moeflow simulate serve`: traffic on any machine, scheduled as it would be there, on a virtual clock."""

from __future__ import annotations

import json
from typing import Any

import click

from moeflow.bench.metrics import Served, summarize
from moeflow.bench.records import Record
from moeflow.bench.tables import serve_tables
from moeflow.cli.bench.output import show
from moeflow.cli.progress import bar
from moeflow.cli.simulate.common import SHIPPED, check_devices, choose_formats, described_options, read_shape
from moeflow.cli.traffic_options import policies_option, rates_option, workload_options
from moeflow.core.engine_config import BLOCK_SIZE, SchedulerConfig
from moeflow.core.errors import CapacityError
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.simulator.serve_run import block_count, pass_seconds_of, serve_virtually
from moeflow.workload.poisson import WorkloadSpec, make_arrivals

EPILOG = f"""\b
Examples:
  moeflow simulate serve --machine h100 --model mixtral-8x7b \\
      --weights int8 --rate 8
  moeflow simulate serve --machine a100-80g --devices 2 \\
      --model mixtral-8x7b --rate 4 --rate 16 --max-num-seqs 128
  moeflow simulate serve --machine h100 --model mixtral-8x7b \\
      --weights int8 --rate 100 --replicas 2

The scheduler is the one that serves; machine and clock are virtual, and the traffic is that of `moeflow bench serve`
with the same options, so that both print the same tables. The whole model is resident; what HTTP, text and sampling
cost is left out.
{SHIPPED}"""


@click.command(epilog=EPILOG, context_settings={"show_default": True})
@described_options
@rates_option
@workload_options
@policies_option
@click.option("--max-num-seqs", type=click.IntRange(1), default=32, help="Requests in a pass at most.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=512, help="Tokens in a pass at most.")
@click.option(
    "--replicas", type=click.IntRange(1), default=1, help="Engines behind one queue, each on such a machine of its own."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead of tables.")
def serve(
    machine: str,
    model: str,
    weights: str | None,
    devices: int,
    rates: tuple[float, ...],
    traffic: dict[str, int],
    policies: tuple[str, ...],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    replicas: int,
    as_json: bool,
) -> None:
    """Predict requests and tokens a second, and latencies, of traffic that arrives at random."""
    host, shape = load_machine(machine), read_shape(model)
    check_devices(host, shape, devices)
    costs = ModelCosts(shape, choose_formats(host, weights))
    num_blocks = block_count(host, costs, BLOCK_SIZE, devices)
    pass_seconds = pass_seconds_of(host, costs, devices)
    records: list[Record] = []
    cases = [(rate, policy) for rate in dict.fromkeys(rates) for policy in dict.fromkeys(policies)]
    with bar(len(cases)) as shown:
        for rate, policy in cases:
            shown.say(f"{rate:g} requests/s, {policy}")
            spec = WorkloadSpec(rate=rate, vocab_size=shape.vocab_size, **traffic)
            config = SchedulerConfig(
                block_size=BLOCK_SIZE,
                num_blocks=_checked(num_blocks, spec),
                max_model_len=spec.max_total,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                policy=policy,
            )
            served = [
                Served(one.arrival.at_s, one.first_s, one.end_s, len(one.arrival.prompt_token_ids), one.arrival.num_new)
                for one in serve_virtually(make_arrivals(spec), config, pass_seconds, replicas)
            ]
            where = host.name if replicas == 1 else f"{replicas} x {host.name}"
            record = _record(f"{model} on {where}", costs.formats.matrices, rate, policy, traffic["seed"])
            records.append({**record, "summary": summarize(served)})
            shown.advance()
    if as_json:
        for record in records:
            click.echo(json.dumps(record, allow_nan=False))
        return
    for table in serve_tables(records):
        show(table)
    click.echo(f"Predicted, not measured; {host.caution}.")


def _checked(num_blocks: int, spec: WorkloadSpec) -> int:
    """Return the blocks. Raises: CapacityError if they do not hold the longest request."""
    if num_blocks * BLOCK_SIZE < spec.max_total:
        raise CapacityError(
            f"beside the model there is room for {num_blocks * BLOCK_SIZE} tokens, one request may have "
            f"{spec.max_total}: take a smaller format (--weights), or more devices"
        )
    return num_blocks


def _record(model: str, weights: str, rate: float, policy: str, seed: int) -> dict[str, Any]:
    """Return what `moeflow bench serve` writes about a run, as far as it goes for one that was none."""
    return {
        "kind": "simulated serve",
        "model": model,
        "weight_format": weights,
        "rate": rate,
        "system": policy,
        "workload": {"seed": seed},
        "errors": [],
    }
