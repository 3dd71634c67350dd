"""Pictures of results, as PNG files. The only file that needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"continuous": "tab:blue", "static": "tab:orange"}
OTHER_COLOUR = "tab:green"
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
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


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
