"""The study's picture: experts that texts leave idle, throughput and latency within shares of the experts."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moeflow.bench.plots import save
from moeflow.bench.records import Record
from studies.sida.arms import RESIDENT
from studies.sida.tables import idle_shares, rows_by_share

_NUM_RANGES = 8  # of lengths


def plot_sida(record: Record, file: Path) -> None:
    """Draw figures 4, 11 and 10 of the paper for one classifier."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    idle_axis, speed_axis, latency_axis = figure.subplots(1, 3)
    _draw_idle(idle_axis, record)
    _draw_ways(speed_axis, record, "texts_per_s", 1.0, "texts/s")
    _draw_ways(latency_axis, record, "latency_s", 1e3, "ms a text, median")
    speed_axis.set_ylim(bottom=0)
    latency_axis.set_yscale("log")
    figure.legend(*speed_axis.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(f"{record['model']}, {record['data']}: {record['num_layers']} x {record['num_experts']} experts")
    save(figure, file)


def _draw_idle(axis: Axes, record: Record) -> None:
    """Draw how many texts are of which length, and how many experts these leave idle."""
    texts = sorted(zip(record["usage"]["num_tokens"], idle_shares(record), strict=True))
    shortest, longest = texts[0][0], texts[-1][0]
    width = max((longest - shortest + 1) / _NUM_RANGES, 1)
    ranges: list[list[float]] = [[] for _ in range(_NUM_RANGES)]
    for length, idle in texts:
        ranges[min(int((length - shortest) / width), _NUM_RANGES - 1)].append(idle)
    middles = [shortest + (number + 0.5) * width for number in range(_NUM_RANGES)]
    axis.bar(middles, list(map(len, ranges)), 0.9 * width, color="0.85")
    axis.set_xlabel("tokens of a text")
    axis.set_ylabel("texts")
    line = axis.twinx()
    points = [(middle, 100 * sum(idle) / len(idle)) for middle, idle in zip(middles, ranges, strict=True) if idle]
    line.plot(*zip(*points, strict=True), marker="o")
    line.set_ylim(0, 100)
    line.set_ylabel("idle experts, %")


def _draw_ways(axis: Axes, record: Record, key: str, scale: float, label: str) -> None:
    """Draw a figure of each way over the share of experts in memory."""
    by_way: dict[str, list[tuple[int, float]]] = {}
    for share, rows in rows_by_share(record).items():
        for row in rows:
            by_way.setdefault(row["way"], []).append((share, scale * row[key]))
    for way, points in by_way.items():
        style = ":" if way == RESIDENT else "-"
        axis.plot(*zip(*sorted(points), strict=True), style, marker="o", label=way)
    axis.set_xlabel("experts in memory, %")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
