"""`moeflow simulate cache`: recorded routing, replayed over sizes, policies and predictors of the expert cache."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from moeflow.bench.tables import Table
from moeflow.cli import lazy
from moeflow.cli.bench.output import show
from moeflow.cli.params import NEW_PICTURE
from moeflow.cli.progress import bar
from moeflow.core.errors import ConfigError
from moeflow.core.units import format_bytes, parse_bytes
from moeflow.experts.predict.registry import NO_PREDICTOR
from moeflow.planner.simulator.cache_replay import (
    BELADY,
    MIN_SLOTS,
    POLICY_NAMES,
    ReplayCase,
    ReplayMachine,
    ReplayResult,
    replay,
)
from moeflow.planner.simulator.replayed_passes import prepare_passes
from moeflow.planner.simulator.replayed_sources import PREDICTOR_NAMES
from moeflow.workload.routing_trace import RoutingTrace, TraceHeader, read_routing_trace

EPILOG = """\b
Examples:
  moeflow generate --record-routing routing.moe --chat -p "Hi" -p "..."
      first, record what routers choose
  moeflow simulate cache --routing routing.moe
  moeflow simulate cache --routing routing.moe --slots 25% --slots 400 \\
      --policy next-use --predictor perfect
  moeflow simulate cache --routing routing.moe --disk-bandwidth 7GB \\
      --compute-time 30 --plot cache.png
  moeflow simulate cache --routing routing.moe --policy next-use --slots 25% \\
      --model MODEL --predictor next-router --predictor next-router:3 \\
      --predictor sida --predictor combined

The cache, policies and predictors are those that serve; disk and clock are virtual, and the cache starts empty.
"belady" evicts whom the future needs last: no policy reads less. "perfect" knows the next layer's experts: no
predictor that looks one layer ahead does better. What predictors take is not counted. A predictor that does not
pay is switched off, as when serving; "on" is the share of passes in which it was not."""


class SlotCount(click.ParamType[str]):
    """A number of slots, or a share of all experts."""

    name = "N|P%"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the text; what a share comes to is known with the trace."""
        text = str(value).strip()
        try:
            if not (0 < float(text[:-1]) <= 100 if text.endswith("%") else int(text) >= MIN_SLOTS):
                raise ValueError
        except ValueError:
            self.fail(f"{text!r} is neither a number of slots from {MIN_SLOTS} on nor a share like 25%", param, ctx)
        return text


@click.command(epilog=EPILOG, context_settings={"show_default": True})
@click.option(
    "--routing", type=click.Path(dir_okay=False, path_type=Path), required=True, help="What --record-routing wrote."
)
@click.option(
    "--slots",
    type=SlotCount(),
    multiple=True,
    default=("25%", "50%", "75%"),
    help="Resident experts, or their share of all; may be given often.",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice(POLICY_NAMES),
    multiple=True,
    default=POLICY_NAMES,
    help="Eviction policy; may be given several times.",
)
@click.option(
    "--predictor",
    "predictors",
    type=click.Choice(PREDICTOR_NAMES),
    metavar="NAME",
    multiple=True,
    default=(NO_PREDICTOR, "previous-token", "perfect"),
    help=f"Who orders prefetches; may be given often: {', '.join(PREDICTOR_NAMES)}.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    help="Of the trace, beside which the network lies that sida and combined ask (`moeflow train predictor`).",
)
@click.option("--disk-bandwidth", default="1GB", help="What the disk reads in a second.")
@click.option("--expert-size", help="Bytes of one expert.  [default: as recorded]", show_default=False)
@click.option(
    "--compute-time",
    type=click.FloatRange(0, min_open=True),
    help="Milliseconds that a pass computes.  [default: as recorded]",
    show_default=False,
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead of tables.")
@click.option("--plot", type=NEW_PICTURE, help="Draw hit rate and speed into this PNG.")
def cache(
    routing: Path,
    slots: tuple[str, ...],
    policies: tuple[str, ...],
    predictors: tuple[str, ...],
    model: Path | None,
    disk_bandwidth: str,
    expert_size: str | None,
    compute_time: float | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Replay recorded routing: hit rate, time lost and tokens a second for each size, policy and predictor."""
    if compute_time is not None and not math.isfinite(compute_time):
        raise ConfigError(f"no pass computes for {compute_time} milliseconds; give a number (--compute-time)")
    trace = read_routing_trace(routing)
    machine = ReplayMachine(parse_bytes(disk_bandwidth), _slab_bytes(trace.header, expert_size))
    named = _named_by_network(model, trace) if model is not None else []
    passes = prepare_passes(trace, None if compute_time is None else compute_time / 1000, named)
    cases = make_cases(trace.header, slots, policies, predictors)
    results = []
    with bar(len(cases)) as shown:
        for case in cases:
            shown.say(f"{case.num_slots} slots, {case.policy}, {case.predictor}")
            results.append(replay(passes, trace.header, machine, case))
            shown.advance()
    if as_json:
        for result in results:
            click.echo(json.dumps(to_json(result), allow_nan=False))
    else:
        for num_slots in dict.fromkeys(case.num_slots for case in cases):
            show(make_table([one for one in results if one.case.num_slots == num_slots], trace, machine))
        if trace.dropped_bytes:
            click.echo(f"The trace's last {trace.dropped_bytes} bytes are cut or damaged and were left out.")
    if plot is not None:
        title = f"{routing.name}: a disk of {format_bytes(machine.disk_bytes_per_s)}/s, predicted"
        draw(results, trace.header, title, plot)


def _named_by_network(model: Path, trace: RoutingTrace) -> list[list[list[int]] | None]:
    with bar(len(trace.passes)) as shown:
        shown.say("asking the network")
        return lazy.recorded_forecast(model, trace, shown.advance)


def make_cases(
    header: TraceHeader, slots: Sequence[str], policies: Sequence[str], predictors: Sequence[str]
) -> list[ReplayCase]:
    """Return what to replay, each once; Belady, who needs no help, alone and as the last of its size."""
    total = header.num_layers * header.num_experts
    cases = []
    for text in slots:
        num_slots = round(total * float(text[:-1]) / 100) if text.endswith("%") else int(text)
        num_slots = min(max(num_slots, MIN_SLOTS), total)
        pairs = itertools.product([name for name in policies if name != BELADY], predictors)
        cases += [ReplayCase(num_slots, policy, predictor) for policy, predictor in pairs]
        if BELADY in policies:
            cases.append(ReplayCase(num_slots, BELADY, NO_PREDICTOR))
    return list(dict.fromkeys(cases))


def make_table(results: Sequence[ReplayResult], trace: RoutingTrace, machine: ReplayMachine) -> Table:
    """Return the results of one size as a table."""
    num_slots = results[0].case.num_slots
    total = trace.header.num_layers * trace.header.num_experts
    size = format_bytes(num_slots * machine.slab_bytes)
    columns = ("policy", "predictor", "on", "hits", "tokens/s", "stall", "read", "prefetched", "of these wasted")
    rows = [
        (
            result.case.policy,
            result.case.predictor,
            "" if result.case.predictor == NO_PREDICTOR else f"{result.prefetching_share:.0%}",
            f"{result.stats.hit_rate:.1%}",
            f"{result.tokens_per_s:.2f}",
            f"{result.stats.stall_s / result.seconds:.0%}" if result.seconds else "",
            format_bytes(result.stats.demand_bytes + result.stats.prefetched_bytes),
            format_bytes(result.stats.prefetched_bytes),
            format_bytes(result.stats.wasted_bytes),
        )
        for result in results
    ]
    title = f"{num_slots} of {total} experts resident ({num_slots / total:.0%}, {size})"
    passes = f"{len(trace.passes)} passes, {results[0].num_generated} tokens"
    note = f"{passes}; disk {format_bytes(machine.disk_bytes_per_s)}/s; stall: share of the time spent waiting for it."
    return Table(title, columns, tuple(rows), (note,))


def to_json(result: ReplayResult) -> dict[str, Any]:
    """Return a result as one flat object."""
    stats = dataclasses.asdict(result.stats)
    rest = {
        "hit_rate": result.stats.hit_rate,
        "seconds": result.seconds,
        "num_generated": result.num_generated,
        "tokens_per_s": result.tokens_per_s,
        "prefetching_share": result.prefetching_share,
    }
    return {**dataclasses.asdict(result.case), **rest, **stats}


def draw(results: Sequence[ReplayResult], header: TraceHeader, title: str, file: Path) -> None:
    """Write a picture with a column for each predictor and a line for each policy."""
    lines: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for result in results:
        point = (result.case.num_slots, result.stats.hit_rate, result.tokens_per_s)
        lines.setdefault((result.case.policy, result.case.predictor), []).append(point)
    lazy.plot_cache_replay(lines, header.num_layers * header.num_experts, title, file)


def _slab_bytes(header: TraceHeader, requested: str | None) -> int:
    if requested is not None:
        return parse_bytes(requested)
    if not header.slab_bytes:
        raise ConfigError("the trace does not report how large an expert is. Give it with --expert-size")
    return header.slab_bytes
