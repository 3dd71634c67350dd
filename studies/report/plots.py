"""The picture of a sweep of serving: throughput over the arrival rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moeflow.bench.plots import COLOURS, save
from studies.harness.plots import draw_spreads


def plot_throughput(systems: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Draw requests and tokens a second against the arrival rate. `systems` maps a name to its records."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, key, label in zip(
        axes, ("requests_per_s", "tokens_per_s"), ("requests/s", "generated tokens/s"), strict=True
    ):
        for number, (name, records) in enumerate(systems.items()):
            values: dict[float, list[float]] = {}
            for record in records:
                if key in record["summary"]:
                    values.setdefault(record["rate"], []).append(record["summary"][key])
            draw_spreads(axis, values, color=COLOURS.get(name, f"C{number}"), label=name)
        axis.set_xlabel("arrivals/s")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    save(figure, file)
