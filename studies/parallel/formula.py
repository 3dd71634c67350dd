"""Claim: the layout of experts that a formula chooses is within 5% of the best that simulation finds, on average.

Passes of many sizes, skews, numbers of ranks, models and machines; a link's rate, or through the host's memory. The
formula knows how skewed routers are, the simulator counts what they choose, on average over a few draws; experts that
are placed by load were placed by an earlier batch's. Regret is the chosen layout's simulated time over that of the best
one that fits. Nothing is measured: both sides are predictions, of the same machines.

    python -m studies.parallel.formula
    python -m studies.parallel.formula --machine host.json --machine h100=25GB --model mixtral-8x7b --json
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.cli.progress import bar
from moeflow.cli.simulate.common import choose_formats, read_shape
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import parse_bytes
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.model_files import shipped_models
from studies.harness.command import run_study
from studies.harness.records import publish
from studies.parallel.layer_cost import ParallelLayer, rank_link
from studies.parallel.layout_choice import choose_layout
from studies.parallel.layout_estimate import CHOICES
from studies.parallel.parallel_run import run_layouts
from studies.parallel.simulated import expected_layer, loads_before, skew_router
from studies.parallel.skew_router import SkewRouter

TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384)
SKEWS: Final = (0.0, 0.3, 0.6, 0.8, 0.95)
RANKS: Final = (2, 4, 8, 16, 64)
MACHINES: Final = ("h100=450GB", "h100=25GB", "l4")
FINE_GRAINED: Final = "128 small experts"
LOAD_TOKENS: Final = 8192  # of the batch by which experts are placed
DRAWS: Final = 1024  # tokens to draw at least, for few in a pass
WORST: Final = 5  # points to show
CHANCES: Final = (50, 95)  # percentiles


@dataclass(frozen=True, slots=True)
class Point:
    """One pass on one machine."""

    machine: str
    model: str
    num_ranks: int
    num_tokens: int
    skew: float

    def __str__(self) -> str:
        return f"{self.model} on {self.num_ranks} x {self.machine}, {self.num_tokens} tokens, skew {self.skew:g}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was chosen, and how good that is."""

    point: Point
    chosen: str
    best: str
    regret: float


def shape_of(model: str) -> ModelConfig:
    """Return a model's shape; of the finely grained one, that of mixtral-8x7b with its experts cut in sixteen."""
    if model != FINE_GRAINED:
        return read_shape(model)
    shape = read_shape("mixtral-8x7b")
    return shape.with_fields(num_experts=128, top_k=8, intermediate_size=shape.feed_forward.intermediate_size // 16)


def layers(point: Point) -> tuple[SkewRouter, list[ParallelLayer]]:
    """Return a point's router, and a layer for each of some draws of what it chooses."""
    name, _, rate = point.machine.partition("=")
    host, shape = load_machine(name), shape_of(point.model)
    router = skew_router(shape, point.model, point.skew, None, seed=0)
    loads = loads_before(router, LOAD_TOKENS)
    drawn = [replace(router, seed=seed) for seed in range(max(min(DRAWS // point.num_tokens, 8), 2))]
    return router, [
        ParallelLayer(
            level=host.compute_level,
            link=rank_link(host, parse_bytes(rate) if rate else None),
            costs=ModelCosts(shape, choose_formats(host, None)),
            num_ranks=point.num_ranks,
            topk_ids=each.route(point.num_tokens),
            loads=loads,
            capacity_factor=1.0,
        )
        for each in drawn
    ]


def outcome(point: Point) -> Outcome | None:
    """Return how good the choice for a pass is; None: no layout fits."""
    router, draws = layers(point)
    choice = choose_layout(expected_layer(draws[0], router))
    if choice.best is None:
        return None
    seconds = Counter[str]()
    for draw in draws:
        for name, run in run_layouts(draw, tuple(CHOICES))[0].items():
            if choice.estimates[name].fits:
                seconds[name] += run.seconds  # type: ignore[assignment]
    best = min(seconds, key=lambda name: seconds[name])
    return Outcome(point, choice.best.layout, best, seconds[choice.best.layout] / seconds[best])


def points(machines: Sequence[str], models: Sequence[str]) -> Iterator[Point]:
    """Yield the grid."""
    for each in itertools.product(machines, models, RANKS, TOKENS, SKEWS):
        yield Point(*each)


@click.command()
@click.option("--machine", "machines", multiple=True, default=MACHINES, help="NAME_OR_FILE, or NAME_OR_FILE=LINK_RATE.")
@click.option("--model", "models", multiple=True, default=(*shipped_models(), FINE_GRAINED))
@result_options
def main(machines: Sequence[str], models: Sequence[str], as_json: bool, out: Path | None) -> None:
    """Choose and simulate at every point of a grid."""
    grid = list(points(machines, models))
    outcomes = []
    with bar(len(grid)) as shown:
        for point in grid:
            outcomes.append(outcome(point))
            shown.advance()
    publish(
        "layout_choice",
        table,
        out,
        as_json=as_json,
        **summary([one for one in outcomes if one is not None]),
        num_unfit=outcomes.count(None),
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of each machine and of all, and the worst points."""
    machines = dict.fromkeys(one.point.machine for one in outcomes)
    regrets = {name: [one.regret for one in outcomes if one.point.machine == name] for name in machines}
    regrets["all"] = [one.regret for one in outcomes]
    worst = sorted((one for one in outcomes if one.chosen != one.best), key=lambda one: -one.regret)[:WORST]
    return {
        "regrets": {name: _figures(values) for name, values in regrets.items()},
        "worst": [
            {"point": str(one.point), "chosen": one.chosen, "best": one.best, "regret": one.regret} for one in worst
        ],
        "chosen": Counter(one.chosen for one in outcomes),
    }


def _figures(regrets: Sequence[float]) -> dict[str, float]:
    median, high = np.percentile(regrets, CHANCES)
    return {
        "points": len(regrets),
        "median": float(median),
        "mean": float(np.mean(regrets)),
        "p95": float(high),
        "worst": max(regrets),
        "share_best": float(np.mean([regret == 1 for regret in regrets])),
    }


def table(record: Record) -> Table:
    """Return the figures of each machine, the worst points below."""
    columns = ("machine", "points", "median", "mean", "95%", "worst", "best chosen")
    rows = tuple(
        (
            name,
            f"{one['points']:,}",
            *(f"{one[figure]:.4f}" for figure in ("median", "mean", "p95", "worst")),
            f"{one['share_best']:.1%}",
        )
        for name, one in record["regrets"].items()
    )
    worst = tuple(
        f"{one['regret']:.3f}: {one['chosen']} instead of {one['best']}, {one['point']}" for one in record["worst"]
    )
    chosen = ", ".join(f"{name} {count:,}" for name, count in record["chosen"].items())
    left_out = f"Left out: {record['num_unfit']:,} points where no layout fits. Chosen: {chosen}."
    return Table("Layouts chosen by formula: simulated time over the best", columns, rows, (left_out, *worst))


if __name__ == "__main__":
    run_study(main)
