"""One MoE layer on many ranks, predicted by layout of its experts, for any skew of routing."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.cli.params import NEW_PICTURE
from moeflow.cli.simulate.common import SHIPPED, choose_formats, read_shape, shape_options
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import Machine
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_bytes, format_seconds, parse_bytes
from moeflow.parallel.placement.expert_load import LoadTracker
from moeflow.parallel.placement.layouts import ADDED_LAYOUTS, LAYOUTS
from moeflow.parallel.placement.placement import Loads
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.hardware.machine_files import load_machine
from studies.harness.command import run_study
from studies.parallel.layer_cost import ParallelLayer, rank_link
from studies.parallel.layout_choice import LayoutChoice, choose_layout
from studies.parallel.layout_estimate import ExpectedLayer
from studies.parallel.parallel_run import ParallelRun, run_layouts
from studies.parallel.plots import plot_simulated
from studies.parallel.router_chances import skewed_routing
from studies.parallel.skew_router import SkewRouter

MOST_RANKS = 1 << 14
STUDY_CAPACITY_FACTOR = 50.0  # of the study of sliced experts, unless there are fewer experts

COLUMNS = (
    "layout",
    "layer",
    "speed-up",
    "work max/mean",
    "idle",
    "sent a rank",
    "experts a rank",
    "dropped",
)

EPILOG = f"""\b
Examples:
  python -m studies.parallel.simulated --machine h100 --model mixtral-8x7b \\
      --ranks 8 --link 450GB
  python -m studies.parallel.simulated --machine a100-80g --model dbrx \\
      --ranks 4 --tokens 30000 --skew 0.9 --capacity-factor 2
  python -m studies.parallel.simulated --machine t4 --model ./config.json \\
      --ranks 1024 --tokens 1000000 --layout sliced --layout expert --json

replicated has all experts on every rank; expert has whole ones, by index; expert-by-load places them by the tokens of
an earlier batch, with one more a rank, for replicas; capacity is the baseline, which pads each expert's rows to a fixed
number and drops what is beyond (DeepSpeed); capacity-dropless pads to the largest load; sliced gives each rank a slice
of every expert; layouts that other packages add place whole experts as they say. Ranks wait for each other after every
section: routing, exchange, experts, exchange. A rank is one device, or where the machine has none, a host.

"By formula" is what would be chosen without drawing any routing: the fastest of the layouts that fit, the baselines
left out, as expected for such routers, whatever --seed and of moeflow's own whatever --layout; how far ahead it is of
the next and by what most; and how much faster the best layout is on twice the ranks.
{SHIPPED}"""


def skew_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for how unevenly routers choose."""
    options = [
        click.option(
            "--skew", type=click.FloatRange(0, 1), default=0.6, help="Share of the tokens that go to hot experts."
        ),
        click.option(
            "--skew-experts",
            type=click.IntRange(1),
            help="How many are hot.  [default: a tenth of them]",
            show_default=False,
        ),
        click.option("--seed", type=click.IntRange(0), default=0, help="Of the routing."),
    ]
    return functools.reduce(lambda inner, option: option(inner), reversed(options), command)


link_option = click.option(
    "--link",
    help='Bytes a second from a rank to the others, like "50GB".  [default: through the host\'s memory]',
    show_default=False,
)


def skew_router(shape: ModelConfig, model: str, skew: float, skew_experts: int | None, seed: int) -> SkewRouter:
    """Return a router for a model. Raises: ConfigError if it has no experts."""
    if not shape.routing.num_experts:
        raise ConfigError(f"{model} has no experts that could be laid out over ranks: choose a model that has")
    return SkewRouter(
        num_experts=shape.routing.num_experts,
        top_k=shape.routing.top_k,
        router_skew=skew,
        num_experts_skew=skew_experts or max(shape.routing.num_experts // 10, 1),
        seed=seed,
    )


@click.command(epilog=EPILOG, context_settings={"show_default": True})
@shape_options
@click.option("--ranks", type=click.IntRange(1, MOST_RANKS), default=4, help="That share the experts.")
@click.option("--tokens", type=click.IntRange(1, 1 << 24), default=4096, help="In the pass, total of all ranks.")
@skew_options
@click.option(
    "--capacity-factor",
    type=click.FloatRange(0, min_open=True),
    help="Of the baseline.  [default: as many as experts, at most 50]",
    show_default=False,
)
@link_option
@click.option(
    "--layout",
    "layouts",
    type=click.Choice(list(LAYOUTS)),
    multiple=True,
    default=tuple(LAYOUTS),
    help="May be given often.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead of a table.")
@click.option("--plot", type=NEW_PICTURE, help="Draw what a rank takes for each section into this PNG.")
def parallel(
    machine: str,
    model: str,
    weights: str | None,
    ranks: int,
    tokens: int,
    skew: float,
    skew_experts: int | None,
    seed: int,
    capacity_factor: float | None,
    link: str | None,
    layouts: tuple[str, ...],
    as_json: bool,
    plot: Path | None,
) -> None:
    """Predict an MoE layer's time, what its ranks compute and send, and how long they wait for each other."""
    host, shape = load_machine(machine), read_shape(model)
    router = skew_router(shape, model, skew, skew_experts, seed)
    layer = ParallelLayer(
        level=host.compute_level,
        link=rank_link(host, None if link is None else parse_bytes(link)),
        costs=ModelCosts(shape, choose_formats(host, weights)),
        num_ranks=ranks,
        topk_ids=router.route(tokens),
        loads=loads_before(router, tokens),
        capacity_factor=_finite(capacity_factor) or min(float(shape.routing.num_experts), STUDY_CAPACITY_FACTOR),
    )
    runs, baseline = run_layouts(layer, layouts)
    choice = choose_layout(expected_layer(layer, router), [name for name in layouts if name in ADDED_LAYOUTS])
    title = f"One MoE layer of {model}: {tokens:,} tokens on {ranks} x {host.name}, {layer.costs.formats.matrices}"
    if plot is not None:
        plot_simulated(runs, title, plot)
        click.echo(f"drew {plot}", err=True)
    if as_json:
        for run in runs.values():
            click.echo(json.dumps(to_json(run, baseline, layer, choice), allow_nan=False))
    else:
        rows = tuple(_row(run, baseline, layer) for run in runs.values())
        show(Table(title, COLUMNS, rows, (f"By formula: {choice.text}.", *_notes(runs, layer, host))))


def _finite(factor: float | None) -> float | None:
    if factor is not None and not math.isfinite(factor):
        raise ConfigError(f"--capacity-factor {factor:g} makes no sense: give a number above 0, like 1.25")
    return factor


def loads_before(router: SkewRouter, num_tokens: int) -> Loads:
    """Return the tokens that each expert has had in a batch before, [E]: of the same router, by other chances."""
    tracker = LoadTracker(1, router.num_experts, half_life=1)
    tracker.add_layer(0, dataclasses.replace(router, seed=router.seed + 1).route(num_tokens))
    tracker.end_pass()
    loads: Loads = tracker.loads[0]
    return loads


def expected_layer(layer: ParallelLayer, router: SkewRouter) -> ExpectedLayer:
    """Return a layer with a known router but unknown choices of tokens."""
    return ExpectedLayer(
        level=layer.level,
        link=layer.link,
        costs=layer.costs,
        num_ranks=layer.num_ranks,
        num_tokens=len(layer.topk_ids),
        routing=skewed_routing(router.num_experts, router.top_k, router.router_skew, router.num_experts_skew),
    )


def _row(run: ParallelRun, baseline: ParallelRun, layer: ParallelLayer) -> tuple[str, ...]:
    return (
        run.layout,
        format_seconds(run.seconds),
        f"{baseline.seconds / run.seconds:.2f}",
        f"{run.work_imbalance:.2f}",
        f"{run.idle_s.mean() / run.seconds:.0%} ± {run.idle_s.std() / run.seconds:.0%}",
        format_bytes(run.cost.sent_bytes.mean()),
        format_bytes(_experts_bytes(run, layer)) + ("" if _fits(run, layer) else " (!)"),
        f"{run.dropped_share:.1%}",
    )


def _notes(runs: Mapping[str, ParallelRun], layer: ParallelLayer, host: Machine) -> tuple[str, ...]:
    notes = [
        f"speed-up: over capacity, whose factor is {layer.capacity_factor:g}; idle: mean and standard deviation over "
        "ranks; experts a rank: of all layers, at most.",
        f"Predicted, not measured; {host.caution}.",
    ]
    if not all(_fits(run, layer) for run in runs.values()):
        notes.append(f"(!): more than a rank has ({format_bytes(layer.level.capacity_bytes)}). Take more ranks.")
    return tuple(notes)


def _experts_bytes(run: ParallelRun, layer: ParallelLayer) -> float:
    """Return what the experts of all layers take of the rank that has most."""
    return float(run.cost.weight_bytes.max()) * layer.costs.num_moe_layers


def _fits(run: ParallelRun, layer: ParallelLayer) -> bool:
    return _experts_bytes(run, layer) <= layer.level.capacity_bytes


def to_json(run: ParallelRun, baseline: ParallelRun, layer: ParallelLayer, choice: LayoutChoice) -> dict[str, Any]:
    """Return a layout as one object; each section with its mean and standard deviation over the ranks."""
    cost = run.cost
    return {
        "layout": run.layout,
        "seconds": run.seconds,
        "speed_up": baseline.seconds / run.seconds,
        "capacity_factor": layer.capacity_factor,
        "work_max_over_mean": run.work_imbalance,
        "idle_mean_s": float(run.idle_s.mean()),
        "idle_std_s": float(run.idle_s.std()),
        "sections": {
            name: {"mean_s": float(times.mean()), "std_s": float(times.std()), "max_s": float(times.max())}
            for name, times in cost.sections.items()
        },
        "sent_bytes_mean": float(cost.sent_bytes.mean()),
        "sent_bytes_max": float(cost.sent_bytes.max()),
        "experts_bytes": _experts_bytes(run, layer),
        "fits": _fits(run, layer),
        "dropped_share": run.dropped_share,
        "by_formula": _by_formula(run.layout, choice),
    }


def _by_formula(layout: str, choice: LayoutChoice) -> dict[str, Any] | None:
    """Return what is expected of a layout; None: it is the baseline, which is not to be chosen."""
    if layout not in choice.estimates:
        return None
    return {
        "seconds": choice.estimates[layout].seconds,
        "seconds_on_twice_the_ranks": choice.doubled[layout].seconds,
        "is_chosen": choice.best is not None and choice.best.layout == layout,
    }


if __name__ == "__main__":
    run_study(parallel)
