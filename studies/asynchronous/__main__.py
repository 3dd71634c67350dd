"""Expert parallelism of several batches in flight, predicted with barriers and without."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.cli.params import NEW_FILE
from moeflow.cli.progress import bar
from moeflow.cli.simulate.common import SHIPPED, choose_formats, read_shape, shape_options
from moeflow.core.errors import ConfigError
from moeflow.core.units import format_seconds, parse_bytes
from moeflow.parallel.placement.eplb import place_by_load
from moeflow.parallel.placement.placement import ExpertIds, ExpertPlacement
from moeflow.pipeline.runtime.perfetto import write_perfetto
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.hardware.machine_files import load_machine
from studies.asynchronous.inflight_run import SCHEDULES, InFlight, InFlightRun
from studies.asynchronous.mapper import LayerMapper, LeastLoadedMapper, Mapper, RoundRobinMapper
from studies.harness.command import run_study
from studies.parallel.layer_cost import rank_link
from studies.parallel.simulated import link_option, loads_before, skew_options, skew_router
from studies.parallel.skew_router import SkewRouter

MAX_CELLS: Final = 1 << 27  # of the table of pairs by layer, batch, device and expert
ROUND_ROBIN, LEAST_LOADED, LAYERS = "round-robin", "least-loaded", "layers"

EPILOG = f"""\b
Examples:
  python -m studies.asynchronous --machine h100 --model mixtral-8x7b \\
      --ranks 8 --link 450GB
  python -m studies.asynchronous --machine l4 --model dbrx --ranks 4 \\
      --batches 16 --skew 0 --trace async.json --schedule asynchronous \\
      --mapper least-loaded

synchronous runs one batch a device at a time, and all devices wait for all after each section of a layer: attention,
exchange, experts, exchange; asynchronous begins each piece of work when its own inputs are there. round-robin has
experts by index and batches on devices in turn; least-loaded places experts by the tokens of earlier batches, with one
more a device for replicas, and gives work to where least is.
{SHIPPED}"""


@click.command("async", epilog=EPILOG, context_settings={"show_default": True})
@shape_options
@click.option("--ranks", type=click.IntRange(1, 4096), default=4, help="Devices that share the experts.")
@click.option("--batches", type=click.IntRange(1), help="In flight.  [default: four a device]", show_default=False)
@click.option("--batch-size", type=click.IntRange(1), default=256, help="Sequences of a batch, which decode a token.")
@click.option("--context", type=click.IntRange(1), default=512, help="Tokens of each sequence.")
@click.option("--layers", type=click.IntRange(1), help="Of the model.  [default: all]", show_default=False)
@skew_options
@link_option
@click.option(
    "--schedule",
    "schedules",
    type=click.Choice(list(SCHEDULES)),
    multiple=True,
    default=tuple(SCHEDULES),
    help="May be given often.",
)
@click.option(
    "--mapper",
    "mappers",
    type=click.Choice([ROUND_ROBIN, LEAST_LOADED, LAYERS]),
    multiple=True,
    default=(ROUND_ROBIN, LEAST_LOADED),
    help="May be given often.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead of a table.")
@click.option("--trace", type=NEW_FILE, help="Write the pass for ui.perfetto.dev; of one schedule and mapper.")
def simulate_async(
    machine: str,
    model: str,
    weights: str | None,
    ranks: int,
    batches: int | None,
    batch_size: int,
    context: int,
    layers: int | None,
    skew: float,
    skew_experts: int | None,
    seed: int,
    link: str | None,
    schedules: tuple[str, ...],
    mappers: tuple[str, ...],
    as_json: bool,
    trace: Path | None,
) -> None:
    """Predict a decoding step of several batches on devices that share experts, and how long devices idle."""
    cases = [(schedule, mapper) for mapper in dict.fromkeys(mappers) for schedule in dict.fromkeys(schedules)]
    if trace is not None and len(cases) > 1:
        raise ConfigError("--trace is of one run; choose it with --schedule and --mapper")
    host, shape = load_machine(machine), read_shape(model)
    router = skew_router(shape, model, skew, skew_experts, seed)
    num_layers = min(layers or shape.num_layers, shape.num_layers)
    at = InFlight(
        level=host.compute_level,
        link=rank_link(host, None if link is None else parse_bytes(link)),
        costs=ModelCosts(shape, choose_formats(host, weights)),
        num_layers=num_layers,
        num_devices=ranks,
        num_batches=batches or 4 * ranks,
        batch_size=batch_size,
        context=context,
    )
    if at.num_layers * at.num_batches * at.num_devices * shape.routing.num_experts > MAX_CELLS:
        raise ConfigError(
            f"{at.num_layers} layers of {at.num_batches} batches on {ranks} devices are too much to simulate task by "
            "task: give fewer --layers or --batches"
        )
    runs: dict[tuple[str, str], InFlightRun] = {}
    with bar(len(cases)) as shown:
        for schedule, mapper in cases:
            shown.say(f"{schedule}, {mapper}")
            runs[schedule, mapper] = InFlightRun(at, _route(router, at), _MAPPERS[mapper](router, at), schedule)
            shown.advance()
    if as_json:
        for case, run in runs.items():
            click.echo(json.dumps(to_json(case, run), allow_nan=False))
    else:
        note = f"idle: of devices, mean and standard deviation. Predicted, not measured; {host.caution}."
        show(
            _table(runs, f"{model} on {ranks} x {host.name}: {at.num_batches} batches of {batch_size} in flight", note)
        )
    if trace is not None:
        write_perfetto(next(iter(runs.values())).line.to_trace(), trace)


def _route(router: SkewRouter, at: InFlight) -> Callable[[int, int], ExpertIds]:
    """Return what routers choose, by other chances in each layer and batch."""

    def route(layer: int, batch: int) -> ExpertIds:
        number = 2 + layer * at.num_batches + batch  # the first two are the batches that loads are known from
        return dataclasses.replace(router, seed=router.seed * MAX_CELLS + number).route(at.batch_size)

    return route


def _round_robin(router: SkewRouter, at: InFlight) -> Mapper:
    return RoundRobinMapper(ExpertPlacement.by_index(at.num_layers, router.num_experts, at.num_devices))


def _least_loaded(router: SkewRouter, at: InFlight) -> Mapper:
    loads = loads_before(router, at.batch_size * at.num_batches)
    slots = ceil(router.num_experts / at.num_devices) + 1
    placement = place_by_load(loads[None], at.num_devices, slots)
    return LeastLoadedMapper(msgspec.structs.replace(placement, homes=placement.homes * at.num_layers))


def _layers(_: SkewRouter, at: InFlight) -> Mapper:
    return LayerMapper(at.num_devices)


_MAPPERS: Final[Mapping[str, Callable[[SkewRouter, InFlight], Mapper]]] = {
    ROUND_ROBIN: _round_robin,
    LEAST_LOADED: _least_loaded,
    LAYERS: _layers,
}


def _table(runs: Mapping[tuple[str, str], InFlightRun], title: str, note: str) -> Table:
    slowest = max(run.seconds for run in runs.values())
    rows = [
        (
            schedule,
            mapper,
            format_seconds(run.seconds),
            f"{slowest / run.seconds:.2f}",
            f"{run.idle_shares.mean():.0%} ± {run.idle_shares.std():.0%}",
        )
        for (schedule, mapper), run in runs.items()
    ]
    return Table(title, ("schedule", "mapper", "step", "speed-up", "idle"), tuple(rows), (note,))


def to_json(case: tuple[str, str], run: InFlightRun) -> dict[str, Any]:
    """Return a run as one object."""
    return {
        "schedule": case[0],
        "mapper": case[1],
        "seconds": run.seconds,
        "idle_mean": float(run.idle_shares.mean()),
        "idle_std": float(run.idle_shares.std()),
        "idle_shares": run.idle_shares.tolist(),
    }


if __name__ == "__main__":
    run_study(simulate_async)
