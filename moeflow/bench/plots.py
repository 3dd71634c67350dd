"""Pictures of results, as PNG files. The only file that needs matplotlib (the extra `bench`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"continuous": "tab:blue", "static": "tab:orange"}
OTHER_COLOUR = "tab:green"
LINE_STYLES = ("-", "--", ":", "-.")
NUM_BINS = 12  # of the curves of averages


def plot_latencies(systems: Mapping[str, Sequence[Mapping[str, Any]]], rate: float, file: Path) -> None:
    """Draw latency against the length of prompt, answer and both (thesis, figures 6.2 to 6.5).

    `systems` maps a name to the `requests` of its records at this rate.
    """
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    lengths: tuple[tuple[str, Callable[[int, int], int]], ...] = (
        ("prompt, tokens", lambda prompt, new: prompt),
        ("answer, tokens", lambda prompt, new: new),
        ("prompt and answer, tokens", lambda prompt, new: prompt + new),
    )
    for axis, (label, length) in zip(axes, lengths, strict=True):
        for name, runs in systems.items():
            points = [
                (length(prompt, new), latency)
                for run in runs
                for prompt, new, latency in zip(run["prompt"], run["new"], run["latency_s"], strict=True)
                if latency is not None
            ]
            if points:
                _draw(axis, name, points)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("latency, s")
    axes[0].legend()
    figure.suptitle(f"Latency of a request at {rate:g} requests/s")
    _save(figure, file)


def plot_throughput(systems: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Draw requests and tokens a second against the arrival rate. `systems` maps a name to its records."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, key, label in zip(
        axes, ("requests_per_s", "tokens_per_s"), ("requests/s", "generated tokens/s"), strict=True
    ):
        for name, records in systems.items():
            values: dict[float, list[float]] = {}
            for record in records:
                if key in record["summary"]:
                    values.setdefault(record["rate"], []).append(record["summary"][key])
            rates = sorted(values)
            middles = [statistics.median(values[rate]) for rate in rates]
            below = [middle - min(values[rate]) for rate, middle in zip(rates, middles, strict=True)]
            above = [max(values[rate]) - middle for rate, middle in zip(rates, middles, strict=True)]
            colour = COLOURS.get(name, OTHER_COLOUR)
            axis.errorbar(rates, middles, [below, above], marker="o", capsize=3, color=colour, label=name)
        axis.set_xlabel("arrivals/s")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    _save(figure, file)


def plot_cache_replay(
    lines: Mapping[tuple[str, str], Sequence[tuple[int, float, float]]], num_experts: int, file: Path
) -> None:
    """Draw hit rate and tokens a second against the share of all experts that are resident.

    `lines` maps (policy, predictor) to (slots, hit rate, tokens/s): a colour a policy, a style a predictor.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    policies = list(dict.fromkeys(policy for policy, _ in lines))
    predictors = list(dict.fromkeys(predictor for _, predictor in lines))
    for (policy, predictor), points in lines.items():
        ordered = sorted(points)
        shares = [100 * num_slots / num_experts for num_slots, _, _ in ordered]
        columns = ([100 * hit_rate for _, hit_rate, _ in ordered], [tokens_per_s for _, _, tokens_per_s in ordered])
        for axis, column in zip(axes, columns, strict=True):
            axis.plot(
                shares,
                column,
                label=f"{policy}, {predictor}",
                color=f"C{policies.index(policy)}",
                linestyle=LINE_STYLES[predictors.index(predictor) % len(LINE_STYLES)],
                marker=".",
            )
    for axis, label in zip(axes, ("hit rate, %", "predicted tokens/s"), strict=True):
        axis.set_xlabel("resident experts, % of all")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Software": None})  # the same picture from the same records


def _draw(axis: Axes, name: str, points: Sequence[tuple[int, float]]) -> None:
    """Draw each request as a dot, and the average of each range of lengths as a line."""
    colour = COLOURS.get(name, OTHER_COLOUR)
    xs, ys = zip(*points, strict=True)
    axis.scatter(xs, ys, s=8, alpha=0.35, color=colour, linewidths=0)
    low, high = min(xs), max(xs)
    width = max((high - low + 1) / NUM_BINS, 1)
    bins: dict[int, list[tuple[int, float]]] = {}
    for x, y in points:
        bins.setdefault(int((x - low) / width), []).append((x, y))
    averages = [
        tuple(sum(column) / len(each) for column in zip(*each, strict=True)) for _, each in sorted(bins.items())
    ]
    axis.plot(*zip(*averages, strict=True), color=colour, label=name)
