"""`moeflow bench serve`: how an engine or a running server bears requests that come at random."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from moeflow.bench.records import Record
from moeflow.bench.tables import serve_tables
from moeflow.cli import lazy
from moeflow.cli.api_key import api_key_option
from moeflow.cli.bench.output import Recorder, result_options
from moeflow.cli.help import Command
from moeflow.cli.local_model import planned
from moeflow.cli.options import engine_options_but
from moeflow.cli.params import require_matplotlib
from moeflow.cli.progress import bar
from moeflow.cli.traffic_options import policies_option, rates_option, workload_options
from moeflow.planner.usage import SERVING
from moeflow.workload.poisson import WorkloadSpec

EPILOG = """\b
Examples:
  moeflow bench serve --rate 1 --rate 2 --rate 4
      the built-in model, both policies
  moeflow bench serve ~/models/olmoe --rate 8 -n 256 --repeats 3 \\
      --out docs/studies/results/serve.jsonl --plots docs/images
  moeflow bench serve --policy continuous --rate 4 -n 16 \\
      --speculator dense-source
      with and without drafts
  moeflow bench serve --url http://127.0.0.1:8000 --rate 4
      a running server, as its clients see it

Requests arrive as a Poisson process of the given rate; lengths are uniform between their limits and tokens
uniform over the vocabulary. "static" is padded batching as in FasterTransformer: a batch waits until it is full
or --batch-timeout is over, is padded to its longest prompt and runs until its longest answer is complete. Both
policies get the same requests at the same times. Ctrl-C ends the measurement; finished runs are kept."""


@click.command(cls=Command, epilog=EPILOG, context_settings={"show_default": True})
@engine_options_but("prefix_caching", "prompt_cache", "prompt_cache_bytes")
@click.option("--url", help="Measure this running server instead of a model here.")
@api_key_option("The server's key, with --url.")
@click.option("--allow-remote", is_flag=True, help="Let --url be another machine: be sure that it is yours.")
@click.option("--request-timeout", type=float, default=600.0, help="Seconds of silence until a request to --url fails.")
@click.option("--vocab-size", type=click.IntRange(1), help="Of the server's model, if it does not report.")
@rates_option
@workload_options
@policies_option
@click.option("--batch-timeout", type=float, default=0.05, help="Seconds that a static batch waits to fill.")
@click.option("--repeats", type=click.IntRange(1), default=1, help="Runs at each rate, each with other traffic.")
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Draw latencies into this folder.")
@result_options
def serve(
    overrides: dict[str, Any],
    traffic: dict[str, int],
    url: str | None,
    api_key: str | None,
    allow_remote: bool,
    request_timeout: float,
    vocab_size: int | None,
    rates: tuple[float, ...],
    policies: tuple[str, ...],
    batch_timeout: float,
    repeats: int,
    plots: Path | None,
    as_json: bool,
    out: Path | None,
) -> int:
    """Measure serving: requests and tokens a second, latency, time to the first token.

    MODEL is a Hugging Face folder or a .gguf file; without it and without --url, the built-in model is measured.
    """
    if url and overrides["model"]:
        raise click.UsageError("MODEL and --url exclude each other: the server has its own model")
    if batch_timeout < 0 or request_timeout <= 0:
        raise click.UsageError("--batch-timeout must be at least 0, --request-timeout above 0")
    for rate in rates:  # before anything is loaded
        WorkloadSpec(**traffic, rate=rate, vocab_size=1)
    if plots is not None:
        require_matplotlib()
    recorder = Recorder("serve", out, as_json)
    run = ServeBench(traffic, rates, repeats, recorder)
    try:
        if url is not None:
            address = lazy.check_address(url, allow_remote=allow_remote)
            asyncio.run(run.server(lazy.HttpTarget(address, api_key=api_key, timeout_s=request_timeout), vocab_size))
        else:
            asyncio.run(run.engines(overrides, policies, batch_timeout))
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    recorder.show(serve_tables)
    if recorder.records and plots is not None:
        draw(recorder.records, plots)
    if interrupted:
        return 130
    return int(any(record["summary"]["num_failed"] == traffic["num_requests"] for record in recorder.records))


@dataclasses.dataclass(frozen=True, slots=True)
class ServeBench:
    """One invocation: makes the traffic."""

    traffic: dict[str, int]
    rates: tuple[float, ...]
    repeats: int
    recorder: Recorder

    async def engines(self, overrides: dict[str, Any], policies: tuple[str, ...], batch_timeout_s: float) -> None:
        """Measure each policy in an engine process of its own."""
        base = planned(overrides, SERVING, prefix_caching=False).config
        configs = [
            lazy.with_policy(base, policy, max_prompt=self.traffic["max_prompt"], batch_timeout_s=batch_timeout_s)
            for policy in dict.fromkeys(policies)
        ]
        configs = lazy.on_and_off(configs)
        with closing(lazy.open_checkpoint(base.model_path)) as checkpoint:
            vocab_size = lazy.read_model_config(checkpoint).vocab_size
        sweep = self._sweep(vocab_size)
        with bar(sweep.num_runs * len(configs) * self.traffic["num_requests"]) as shown:
            progress = self.recorder.progress(shown, base.num_threads, counts_requests=True)
            await lazy.run_engines(configs, sweep, progress)

    async def server(self, target: Any, vocab_size: int | None) -> None:
        """Measure a running server."""
        async with target:
            model = await target.model()
            vocab_size = vocab_size or model.vocab_size
            if vocab_size is None:
                raise click.UsageError("the server does not report its model's vocabulary; give --vocab-size")
            sweep = self._sweep(vocab_size)
            lazy.check_server(sweep.spec, model.max_model_len)
            with bar(sweep.num_runs * self.traffic["num_requests"]) as shown:
                progress = self.recorder.progress(shown, None, counts_requests=True)
                await lazy.run_server(target, model.name, sweep, progress)

    def _sweep(self, vocab_size: int) -> Any:
        spec = WorkloadSpec(**self.traffic, rate=self.rates[0], vocab_size=vocab_size)
        return lazy.Sweep(spec, tuple(dict.fromkeys(self.rates)), self.repeats)


def draw(records: list[Record], folder: Path) -> None:
    """Write a picture for each rate."""
    for rate in sorted({record["rate"] for record in records}):
        systems: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            if record["rate"] == rate:
                systems.setdefault(record["system"], []).append(record["requests"])
        file = folder / f"serve-latency-{rate:g}.png"
        lazy.plot_latencies(systems, rate, file)
        click.echo(f"drew {file}", err=True)
