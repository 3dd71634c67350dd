"""Pictures of plans, as PNG files: rooflines (MoE-Lightning, figures 4 and 5) and the map of policies (figure 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from moeflow.bench.plots import save
from moeflow.core.plan import Policy
from moeflow.planner.figures.policy_map import MapPoint, PolicyMap
from moeflow.planner.figures.roofline_figures import RooflineFigure

Panel = tuple[str, Callable[[Policy], float]]

NUM_POINTS = 200
EVEN = 0.005  # values that differ by less are shown as one
NAMES = {"ram": "memory", "device": "device memory"}  # of levels, where they store
COMPUTES = {"ram": "processor"}  # and where they compute
LEGEND_COLUMNS = 95
STAR: Final[dict[str, Any]] = {"markersize": 14, "markeredgecolor": "black", "linestyle": "none", "zorder": 5}
LABEL = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.7, "linewidth": 0}


def plot_rooflines(figures: Sequence[RooflineFigure], title: str, file: Path) -> None:
    """Draw the pictures side by side."""
    figure = Figure(figsize=(7.5 * len(figures), 6.2), layout="constrained")
    for axes, data in zip(np.atleast_1d(figure.subplots(1, len(figures))), figures, strict=True):
        draw_roofline(axes, data)
    figure.suptitle(title)
    save(figure, file)


def draw_roofline(axes: Axes, data: RooflineFigure) -> None:
    """Draw roofs, turning points and the planned work; the legend explains each of them."""
    roofs, at = data.roofs, data.operating
    points = [mark.intensity for mark in data.marks] + [turn.intensity for turn in data.turns]
    points += [it for it in (at.near_intensity, at.far_intensity, roofs.peak / roofs.bandwidth) if it is not None]
    low, high = min(points) / 4, max(points) * 4
    _draw_roofs(axes, data, np.geomspace(low, high, NUM_POINTS))
    for turn, marker in zip(data.turns, "v^", strict=False):
        label = f"{turn.name}, {_number(turn.intensity)} FLOP/B: {turn.meaning}"
        axes.plot(turn.intensity, turn.flops_per_s, f"k{marker}", label=fill(label, LEGEND_COLUMNS))
        place: dict[str, Any] = {"xytext": (6, -4), "textcoords": "offset points", "fontsize": "small", "va": "top"}
        axes.annotate(turn.name, (turn.intensity, turn.flops_per_s), **place)
    bottom = min(roofs.link * low, at.flops_per_s / 4)
    _draw_marks(axes, data, bottom)
    _draw_operating(axes, data)
    axes.set(xlim=(low, high), ylim=(bottom, max(roofs.peak, roofs.far_peak) * 4), title=data.title)
    axes.set_xlabel("FLOP a byte that is read from a memory, or comes from one to the other")
    axes.set_ylabel("FLOP/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(0, -0.14))


def _draw_roofs(axes: Axes, data: RooflineFigure, intensities: NDArray[np.float64]) -> None:
    near, far, roofs = NAMES.get(data.near, data.near), NAMES.get(data.far, data.far), data.roofs
    sloped = [
        (roofs.bandwidth, "C0", f"{near} is read at {_rate(roofs.bandwidth, 'B')}"),
        (roofs.link, "C1", f"{far} to {near}: {_rate(roofs.link, 'B')}"),
    ]
    flat = [(roofs.peak, "C0", f"{_computes(data.near)} computes {_rate(roofs.peak, 'FLOP')}")]
    if roofs.far_peak:
        sloped.append((roofs.far_bandwidth, "C2", f"{far} is read at {_rate(roofs.far_bandwidth, 'B')}"))
        flat.append((roofs.far_peak, "C2", f"{_computes(data.far)} computes {_rate(roofs.far_peak, 'FLOP')}"))
    for rate, color, label in sloped:
        axes.loglog(intensities, rate * intensities, color=color, label=label)
    for peak, color, label in flat:
        axes.axhline(peak, color=color, linestyle="--", label=label)


def _draw_marks(axes: Axes, data: RooflineFigure, bottom: float) -> None:
    for number, mark in enumerate(data.marks):
        axes.axvline(mark.intensity, color="grey", linewidth=0.7)
        height = bottom * 1.3 * 1.5 ** (number % 2)
        style: dict[str, Any] = {"rotation": 90, "fontsize": "x-small", "va": "bottom", "ha": "center"}
        axes.text(mark.intensity, height, mark.name, bbox=LABEL | {"alpha": 1.0}, **style)


def _draw_operating(axes: Axes, data: RooflineFigure) -> None:
    """Draw the plan at its intensity on each level that brings something: one number, under two roofs."""
    at, near, far = data.operating, NAMES.get(data.near, data.near), NAMES.get(data.far, data.far)
    streams = at.near_intensity is not None
    if at.near_intensity is not None:
        nothing = "" if at.far_intensity is not None else f"; nothing comes from {far}"
        label = f"{at.name}: {_number(at.near_intensity)} FLOP a byte read from {near}{nothing}"
        axes.plot(at.near_intensity, at.flops_per_s, "*", color="C0", **STAR, label=fill(label, LEGEND_COLUMNS))
    if at.far_intensity is not None:
        what = f"that comes from {far}" if streams else f"read from {far}"
        label = f"{at.name}: {_number(at.far_intensity)} FLOP a byte {what}"
        color = "C1" if streams else "C2"
        axes.plot(at.far_intensity, at.flops_per_s, "*", color=color, **STAR, label=fill(label, LEGEND_COLUMNS))


def _computes(level: str) -> str:
    return COMPUTES.get(level, level)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot_policy_map(data: PolicyMap, title: str, file: Path) -> None:
    """Draw shares as colours over two properties of the machine; red points: attention on the host.

    A constant value is a line of text instead of a panel of one colour.
    """
    if data.has_device:
        panels: list[Panel] = [
            ("weights that stay on the host, %", lambda it: 100 * (1 - it.weights_on_device)),
            ("keys and values on the host, %", lambda it: 100 * _kv_on_host(it)),
        ]
    else:
        panels = [
            ("experts on disk, %", lambda it: 100 * it.experts_on_disk),
            ("sequences at once", lambda it: it.batch_size),
        ]
    drawn, notes = panels_and_notes(data, panels)
    figure = Figure(figsize=(5 * (len(drawn) + 1), 4.4), layout="constrained")
    every = np.atleast_1d(figure.subplots(1, len(drawn) + 1))
    for axes, (label, value) in zip(every, drawn, strict=False):
        _draw_map(figure, axes, data, label, lambda point, value=value: value(point.policy))  # type: ignore[misc]
    _draw_map(figure, every[-1], data, "tokens/s", lambda point: point.tokens_per_s)
    figure.suptitle(f"{title}: the best policy where the machine were another")
    if data.has_device and any(it.policy is not None and not it.policy.attention_on_device for it in data.points):
        notes.append("red: the host attends")
    if notes:
        figure.supxlabel("; ".join(notes), fontsize="small")
    save(figure, file)


def panels_and_notes(data: PolicyMap, panels: Sequence[Panel]) -> tuple[list[Panel], list[str]]:
    """Return the panels whose numbers differ, and a note on each of the others."""
    drawn, notes = [], []
    for label, value in panels:
        values = [value(point.policy) for point in data.points if point.policy is not None]
        if values and max(values) - min(values) <= EVEN * max(abs(it) for it in values):
            name, _, unit = label.partition(", ")
            notes.append(f"{name}: {_number(values[0])}{unit} everywhere")
        else:
            drawn.append((label, value))
    return drawn, notes


def _draw_map(figure: Figure, axes: Axes, data: PolicyMap, label: str, value: Callable[[MapPoint], float]) -> None:
    xs, ys = sorted({point.x for point in data.points}), sorted({point.y for point in data.points})
    grid = np.full((len(ys), len(xs)), np.nan)
    for point in data.points:
        if point.policy is not None:
            grid[ys.index(point.y), xs.index(point.x)] = value(point)
    shown = axes.pcolormesh(grid, cmap="viridis", edgecolors="white", linewidth=0.5)  # in colours of its own range
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
