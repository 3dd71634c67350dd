"""Pictures of plans, as PNG files: rooflines (MoE-Lightning, figures 4 and 5) and the map of policies (figure 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moeflow.bench.plots import save
from moeflow.core.plan import Policy
from moeflow.planner.figures import PolicyMap, RooflineFigure

NUM_POINTS = 200
NAMES = {"ram": "memory"}  # of levels, where they store
COMPUTES = {"ram": "processor"}  # and where they compute
LABEL = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.7, "linewidth": 0}


def plot_rooflines(figures: Sequence[RooflineFigure], title: str, file: Path) -> None:
    """Draw one picture beside the other."""
    figure = Figure(figsize=(7.5 * len(figures), 5.5), layout="constrained")
    for axes, data in zip(np.atleast_1d(figure.subplots(1, len(figures))), figures, strict=True):
        _draw_roofline(axes, data)
    figure.suptitle(title)
    save(figure, file)


def _draw_roofline(axes: Axes, data: RooflineFigure) -> None:
    near_name, far_name = NAMES.get(data.near, data.near), NAMES.get(data.far, data.far)
    points = [mark.intensity for mark in data.marks] + [data.operating_intensity]
    roofs = data.roofs
    turns = [roofs.peak / roofs.bandwidth, roofs.first_turn, roofs.peak / roofs.link]
    low, high = min(points) / 4, max(*points, *turns) * 4
    intensities = np.geomspace(low, high, NUM_POINTS)
    axes.loglog(
        intensities,
        roofs.bandwidth * intensities,
        color="C0",
        label=f"{near_name} is read at {_rate(roofs.bandwidth, 'B')}",
    )
    axes.loglog(
        intensities, roofs.link * intensities, color="C1", label=f"{far_name} to {near_name}: {_rate(roofs.link, 'B')}"
    )
    axes.axhline(
        roofs.peak, color="C0", linestyle="--", label=f"{_computes(data.near)} computes {_rate(roofs.peak, 'FLOP')}"
    )
    if roofs.far_peak:
        axes.loglog(
            intensities,
            roofs.far_bandwidth * intensities,
            color="C2",
            label=f"{far_name} is read at {_rate(roofs.far_bandwidth, 'B')}",
        )
        axes.axhline(
            roofs.far_peak,
            color="C2",
            linestyle="--",
            label=f"{_computes(data.far)} computes {_rate(roofs.far_peak, 'FLOP')}",
        )
        if roofs.first_turn:
            axes.plot(roofs.first_turn, roofs.far_peak, "kv", label=f"P1 at {_number(roofs.first_turn)} FLOP/B")
    near = data.near_intensity or roofs.peak / roofs.bandwidth
    reached = roofs.local(near)
    if data.near_intensity:
        axes.axhline(reached, color="C3", linestyle=":", label=f"{data.near} at its micro-batch")
    axes.plot(roofs.turning_point_2(near), reached, "k^", label=f"P2 at {_number(roofs.turning_point_2(near))} FLOP/B")
    bottom = roofs.link * low
    for number, mark in enumerate(data.marks):
        axes.axvline(mark.intensity, color="grey", linewidth=0.7)
        axes.text(
            mark.intensity,
            bottom * 1.3 * 1.5 ** (number % 2),
            mark.name,
            rotation=90,
            fontsize="x-small",
            va="bottom",
            ha="center",
            bbox=LABEL | {"alpha": 1.0},
        )
    axes.plot(data.operating_intensity, data.operating_flops_per_s, "r*", markersize=14, label=data.operating_name)
    axes.set(xlim=(low, high), ylim=(bottom, roofs.peak * 4), title=data.title)
    axes.set_xlabel(f"operations a byte of what lies in {far_name}" if roofs.far_peak else "operations a byte")
    axes.set_ylabel("FLOP/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="lower right")


def _computes(level: str) -> str:
    return COMPUTES.get(level, level)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot_policy_map(data: PolicyMap, title: str, file: Path) -> None:
    """Draw shares as colours over two properties of the machine; red points: attention on the host."""
    if data.has_device:
        panels: list[tuple[str, Callable[[Policy, float], float]]] = [
            ("weights that stay on the host, %", lambda policy, _: 100 * (1 - policy.weights_on_device)),
            ("keys and values on the host, %", lambda policy, _: 100 * _kv_on_host(policy)),
            ("tokens/s", lambda _, tokens_per_s: tokens_per_s),
        ]
    else:
        panels = [
            ("experts on disk, %", lambda policy, _: 100 * policy.experts_on_disk),
            ("sequences at once", lambda policy, _: policy.batch_size),
            ("tokens/s", lambda _, tokens_per_s: tokens_per_s),
        ]
    figure = Figure(figsize=(5 * len(panels), 4.2), layout="constrained")
    for axes, (label, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        _draw_map(figure, axes, data, label, value)
    figure.suptitle(f"{title}: the best policy where the machine were another")
    if data.has_device and any(it.policy is not None and not it.policy.attention_on_device for it in data.points):
        figure.supxlabel("red: the host attends", fontsize="small", color="red")
    save(figure, file)


def _draw_map(figure: Figure, axes: Axes, data: PolicyMap, label: str, value: Callable[[Policy, float], float]) -> None:
    xs, ys = sorted({point.x for point in data.points}), sorted({point.y for point in data.points})
    grid = np.full((len(ys), len(xs)), np.nan)
    for point in data.points:
        if point.policy is not None:
            grid[ys.index(point.y), xs.index(point.x)] = value(point.policy, point.tokens_per_s)
    low, high = (0, 100) if label.endswith("%") else (None, None)  # shares are to be compared with each other
    shown = axes.pcolormesh(grid, cmap="viridis", edgecolors="white", linewidth=0.5, vmin=low, vmax=high)
    figure.colorbar(shown, ax=axes)
    axes.set_title(label, fontsize="medium")
    for (row, column), number in np.ndenumerate(grid):
        if not np.isnan(number):
            axes.text(
                column + 0.5,
                row + 0.25,
                f"{number:.3g}",
                ha="center",
                va="center",
                fontsize="x-small",
                color="black",
                bbox=LABEL,
            )
    if data.has_device:
        on_host = [it for it in data.points if it.policy is not None and not it.policy.attention_on_device]
        axes.plot(
            [xs.index(it.x) + 0.5 for it in on_host], [ys.index(it.y) + 0.65 for it in on_host], "ro", markersize=5
        )
    axes.set_xticks(np.arange(len(xs)) + 0.5, [f"{x:g}" for x in xs])
    axes.set_yticks(np.arange(len(ys)) + 0.5, [f"{y:g}" for y in ys])
    axes.set_xlabel(data.x_label)
    axes.set_ylabel(data.y_label)


def _kv_on_host(policy: Policy) -> float:
    return 1 - policy.kv_on_device if policy.attention_on_device else 1.0


def _rate(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}/s"
    return f"{value:.3g} {unit}/s"
