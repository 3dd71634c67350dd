"""The sliced experts paper's figures 6.1 to 6.6, measured with whole models, and the paper's statements.

python -m studies.parallel.paper --out docs/studies/results/sliced_models.jsonl
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from moeflow.cli.bench.output import result_options
from moeflow.cli.help import Command
from moeflow.core.errors import EngineError
from moeflow.parallel.placement.layouts import CAPACITY, CAPACITY_DROPLESS
from moeflow.planner.hardware.host import host_resources
from studies.harness.command import run_study
from studies.harness.interleaved import interleaved
from studies.harness.records import recorder
from studies.parallel.paper_points import FIGURES, SIZES, Point, Sizes, points_of
from studies.parallel.paper_tables import paper_tables
from studies.parallel.published_layouts import DEEPSPEED, EXACT, GROUPED, PER_EXPERT
from studies.parallel.rank_processes import RankProcesses
from studies.parallel.whole_model import ModelRun

ARMS: Final = (DEEPSPEED, CAPACITY, CAPACITY_DROPLESS, PER_EXPERT, GROUPED, EXACT)
DROPLESS: Final = (CAPACITY_DROPLESS, PER_EXPERT, GROUPED, EXACT)
MAX_ERROR: Final = 0.02  # of states, over the largest: sums in another order round to other bfloat16 values

EPILOG = """\b
Examples:
  python -m studies.parallel.paper
      all figures
  python -m studies.parallel.paper --figure encoder --size switch-base --layers 12
      a whole encoder in wall time

Each rank is a process with one thread and sequences of its own; all layers with experts read the same memory. Arms:
deepspeed (capacity, one-hot products), capacity (the same capacity, rows moved by index), capacity-dropless (the least
capacity that drops nothing), sliced-per-expert and sliced (one call for all experts) with a reduce-scatter, and
sliced-exact, which is `moeflow serve --ranks --expert-layout sliced --attention-layout data`."""


@click.command(cls=Command, epilog=EPILOG, context_settings={"show_default": True})
@click.option("--figure", "figures", type=click.Choice(FIGURES), multiple=True, default=FIGURES, help="Often.")
@click.option("--ranks", type=click.IntRange(1, 64), default=2, help="Processes; more than cores are marked.")
@click.option("--size", type=click.Choice(list(SIZES)), default="switch-small", help="Widths of the model.")
@click.option("--layers", type=click.IntRange(2), default=4, help="Of encoder and of decoder; half have experts.")
@click.option("--most-experts", type=click.IntRange(2), default=256, help="Leave out settings with more.")
@click.option("--repeats", type=click.IntRange(1), default=2, help="Measurements of each, after a warm-up.")
@result_options
def paper(
    figures: tuple[str, ...],
    ranks: int,
    size: str,
    layers: int,
    most_experts: int,
    repeats: int,
    as_json: bool,
    out: Path | None,
) -> int:
    """Measure slices of experts against expert parallelism with a capacity, in whole encoders and decoders."""
    sizes = Sizes(ranks, *SIZES[size], layers)
    kept = recorder("sliced_models", out, as_json=as_json)
    for fields in measure(points_of(figures, most_experts), sizes, repeats):
        kept.add({"size": size, **fields}, seed=0, threads=1)
    kept.show(paper_tables)
    return 0


def measure(points: list[Point], sizes: Sizes, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of each setting's record. Raises: EngineError if an arm computes something else; GroupError."""
    for num_experts, found in groupby(points, key=lambda it: it.num_experts):
        with RankProcesses(sizes.layer(num_experts)) as ranks:
            for number, point in enumerate(found):
                if number == 0:  # warm up, and check
                    for arm in ARMS:
                        # Not with a router of its own: its choices depend on the last bits of sums.
                        runs = ranks.run_model(sizes.task(point, arm, is_checked=point.router == "skewed"))
                        _check(arm, runs)
                runs_of: dict[str, list[list[ModelRun]]] = {arm: [] for arm in ARMS}
                for _, arm in interleaved(ARMS, repeats):
                    runs_of[arm].append(ranks.run_model(sizes.task(point, arm, is_checked=False)))
                for arm in set(ARMS) - {PER_EXPERT}:  # whose sections alone are a figure
                    runs_of[arm] = [[run.without_sections() for run in ranks_] for ranks_ in runs_of[arm]]
                yield {
                    "point": msgspec.to_builtins(point),
                    "num_layers": sizes.num_layers,
                    "num_ranks": sizes.num_ranks,
                    "num_cores": host_resources().num_cores,
                    "runs": msgspec.to_builtins(runs_of),
                }


def _check(arm: str, runs: list[ModelRun]) -> None:
    error = max(run.error or 0.0 for run in runs)
    if arm in DROPLESS and error > MAX_ERROR:
        raise EngineError(f"{arm} computes something else than one process (error {error:.1e}): this is a bug")


if __name__ == "__main__":
    run_study(paper)
