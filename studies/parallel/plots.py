"""Pictures of the study: a single case by section, a grid as speed-ups. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from moeflow.bench.plots import save
from moeflow.bench.records import Record
from studies.harness.plots import draw_spreads
from studies.parallel.figures import BASELINE, figures_of, speed_ups
from studies.parallel.layer_cost import PerRank
from studies.parallel.meter import SECTIONS
from studies.parallel.parallel_run import ParallelRun
from studies.parallel.tables import case_name, title


def plot_parallel(records: Sequence[Record], file: Path) -> None:
    """Draw the records of one grid: of a single case processor time by section, else speed-ups."""
    (plot_sections if len(records) == 1 else plot_speed_ups)(records, file)


def plot_sections(records: Sequence[Record], file: Path) -> None:
    """Draw the mean time of each section over the ranks, with its standard deviation (study, figure 6.6)."""
    (record,) = records
    seconds = {
        name: dict(zip(record["sections"], it.usual_s.T, strict=True)) for name, it in figures_of(record).items()
    }
    _draw_sections(seconds, "processor time of a rank, ms", f"{case_name(record)} a rank\n{title(record)}", file)


def plot_simulated(runs: Mapping[str, ParallelRun], heading: str, file: Path) -> None:
    """Draw the same of what was predicted of a layer in several layouts."""
    seconds = {name: run.cost.sections for name, run in runs.items()}
    _draw_sections(seconds, "predicted time of a rank, ms", heading, file)


def _draw_sections(seconds: Mapping[str, Mapping[str, PerRank]], label: str, heading: str, file: Path) -> None:
    """Draw each layout's seconds of each section and rank; a section that a layout does not have is left out."""
    sections = [name for name in SECTIONS if any(name in of_layout for of_layout in seconds.values())]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(seconds)
    for number, (name, of_layout) in enumerate(seconds.items()):
        has = [at for at, section in enumerate(sections) if section in of_layout]
        places = np.array(has) + (number - (len(seconds) - 1) / 2) * width
        means, stds = ([1000 * float(of(of_layout[sections[at]])) for at in has] for of in (np.mean, np.std))
        axis.bar(places, means, width, yerr=stds, capsize=2, label=name)
    axis.set_xticks(range(len(sections)), sections)
    axis.set_yscale("log")
    axis.set_ylabel(label)
    axis.grid(axis="y", alpha=0.3)
    axis.legend()
    figure.suptitle(heading, fontsize="medium")
    save(figure, file)


def plot_speed_ups(records: Sequence[Record], file: Path) -> None:
    """Draw speed-ups over the baseline with their range; along the axis what varies most in the grid."""
    axes: dict[str, Callable[[Record], float]] = {
        "experts": lambda record: record["layer"]["num_experts"],
        "skew": lambda record: record["router_skew"],
        "tokens of a rank": lambda record: max(record["num_tokens"]),
    }
    label, along = max(axes.items(), key=lambda item: len({item[1](record) for record in records}))
    others = [value for name, value in axes.items() if name != label]
    panels: dict[tuple[float, ...], list[Record]] = {}
    for record in records:
        panels.setdefault(tuple(value(record) for value in others), []).append(record)
    figure = Figure(figsize=(2 + 3.6 * len(panels), 4.2), layout="constrained")
    drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    names = [name for name in dict.fromkeys(it for record in records for it in record["layouts"]) if name != BASELINE]
    for axis, (fixed, found) in zip(drawn, panels.items(), strict=True):
        for name in names:
            points = {
                along(record): speed_ups(figures_of(record), name) for record in found if name in record["layouts"]
            }
            draw_spreads(axis, points, label=name)
        kept = [name for name in axes if name != label]
        axis.set_title(
            ", ".join(f"{name} {value:g}" for name, value in zip(kept, fixed, strict=True)), fontsize="medium"
        )
        axis.set_xlabel(label)
        axis.axhline(1, color="0.6", linewidth=1)
        axis.grid(alpha=0.3)
        if label == "experts":
            axis.set_xscale("log", base=2)
    drawn[0].set_ylabel(f"speed-up over {BASELINE}")
    drawn[0].legend()
    figure.suptitle(title(records[0]), fontsize="medium")
    save(figure, file)
