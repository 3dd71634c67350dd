"""Pictures of results, as PNG files. The only file that needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moeflow.bench.metrics import percentile
from moeflow.planner.simulator.time_line import TimeLine, add_steps, kv_buffer, weight_buffer

COLOURS = {"continuous": "tab:blue", "static": "tab:orange"}
OTHER_COLOUR = "tab:green"
IDLE_FACE, IDLE_HATCH = "#f6f6f6", "#dddddd"  # paler than any work
TASK_COLOURS = {
    "pre_attention": "#a6cee3",
    "post_attention": "#1f78b4",
    "device_attention": "#ff7f00",
    "cpu_attention": "#fdbf6f",
    "offload_qkv": "#cab2d6",
    "load_hidden": "#6a3d9a",
    "weights_to_device": "#b2df8a",
    "weights_to_pinned": "#8dd3c7",
    "kv_to_pinned": "#8dd3c7",
    "load_kv": "#33a02c",
    "store_kv": "#e78ac3",
    "save_kv": "#e78ac3",
}
MAX_RANGES = 6  # of lengths, each with its own quantiles
MIN_IN_RANGE = 10  # requests: fewer have no 90th percentile to speak of
Quantiles = Sequence[tuple[int, Literal["-", ":"]]]
QUANTILES: Quantiles = ((50, "-"), (90, ":"))  # and how they are drawn; of more than two systems, only the first
REFERENCE = "belady"  # a policy that no cache can have: drawn in every panel


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
        for number, (name, runs) in enumerate(systems.items()):
            points = [
                (length(prompt, new), latency)
                for run in runs
                for prompt, new, latency in zip(run["prompt"], run["new"], run["latency_s"], strict=True)
                if latency is not None
            ]
            if points:
                quantiles = QUANTILES if len(systems) <= 2 else QUANTILES[:1]
                _draw(axis, name, COLOURS.get(name, f"C{number}"), points, quantiles)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("latency, s")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", markerscale=3)
    dotted = ", dotted: 90th percentile" if len(systems) <= 2 else ""
    figure.suptitle(f"Latency of each request at {rate:g} requests/s; bars: median of requests of like length{dotted}")
    save(figure, file)


def plot_cache_replay(
    lines: Mapping[tuple[str, str], Sequence[tuple[int, float, float]]], num_experts: int, title: str, file: Path
) -> None:
    """Draw hit rate and tokens a second against the share of all experts that are resident, a column a predictor.

    `lines` maps (policy, predictor) to (slots, hit rate, tokens/s). A colour is a policy; `REFERENCE`, which needs no
    predictor, is a grey line in each column.
    """
    predictors = list(dict.fromkeys(predictor for policy, predictor in lines if policy != REFERENCE))
    predictors = predictors or list(dict.fromkeys(predictor for _, predictor in lines))
    policies = [policy for policy in dict.fromkeys(policy for policy, _ in lines) if policy != REFERENCE]
    figure = Figure(figsize=(2.2 + 3.2 * len(predictors), 6), layout="constrained")
    axes = figure.subplots(2, len(predictors), sharex=True, sharey="row", squeeze=False)
    for column, predictor in enumerate(predictors):
        for (policy, theirs), points in lines.items():
            if policy != REFERENCE and theirs != predictor:
                continue
            colour = "0.6" if policy == REFERENCE else f"C{policies.index(policy)}"
            style = "--" if policy == REFERENCE else "-"
            ordered = sorted(points)
            shares = [100 * num_slots / num_experts for num_slots, _, _ in ordered]
            figures = ([100 * hit_rate for _, hit_rate, _ in ordered], [tokens_per_s for _, _, tokens_per_s in ordered])
            for axis, values in zip(axes[:, column], figures, strict=True):
                label = f"{policy}, no predictor" if policy == REFERENCE else policy
                axis.plot(shares, values, style, label=label, color=colour, marker=".")
        axes[0, column].set_title(f"predictor: {predictor}", fontsize="medium")
        axes[1, column].set_xlabel("resident experts, % of all")
    for axis, label in zip(axes[:, 0], ("hit rate, %", "predicted tokens/s"), strict=True):
        axis.set_ylabel(label)
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", title="policy")
    figure.suptitle(title)
    save(figure, file)


def plot_time_lines(lines: Mapping[str, TimeLine], layers: tuple[int, int], file: Path) -> None:
    """Draw when each lane does what, from one layer to before another, with idle time hatched; a panel a pipeline.

    All on one scale of time (MoE-Lightning, figure 6). Below, what streamed weights and fetched keys and values take of
    the device; passes are warm.
    """
    figure = Figure(figsize=(16, 2.6 + 2.0 * len(lines)), layout="constrained")
    axes = figure.subplots(len(lines) + 1, 1, sharex=True)
    windows = {name: line.window(*layers) for name, line in lines.items()}
    scale_s = max(end_s - start_s for start_s, end_s in windows.values())
    for axis, (name, line) in zip(axes[:-1], lines.items(), strict=True):
        start_s, end_s = windows[name]
        _draw_lanes(axis, line, start_s, end_s, scale_s)
        axis.set_title(f"{name}: {1000 * (end_s - start_s):.4g} ms", loc="left", fontsize="medium")
        _draw_memory(axes[-1], name, line, start_s, end_s)
    axes[0].set_xlim(0, 1000 * scale_s)
    axes[-1].set_title(
        "weights, keys and values that pass through the device's memory, GB", loc="left", fontsize="medium"
    )
    axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes[-1].set_ylim(bottom=0)
    axes[-1].grid(alpha=0.3)
    axes[-1].set_xlabel("ms; numbers are micro-batches, or pages of weights; hatched: idle")
    used = {one.task.op for line in lines.values() for ones in line.lanes.values() for one in ones}
    patches = [Patch(facecolor=colour, label=op) for op, colour in TASK_COLOURS.items() if op in used]
    figure.legend(handles=patches, loc="outside right upper", fontsize="small")
    save(figure, file)


def _draw_memory(axis: Axes, name: str, line: TimeLine, start_s: float, end_s: float) -> None:
    """Draw bytes over time, cut at both ends."""
    steps = add_steps(weight_buffer(line, is_warm=True), kv_buffer(line))
    before = [num_bytes for time_s, num_bytes in steps if time_s <= start_s]
    points = [(start_s, before[-1]), *(step for step in steps if start_s < step[0] < end_s)]
    points.append((end_s, points[-1][1]))
    times = [1000 * (time_s - start_s) for time_s, _ in points]
    axis.step(times, [num_bytes / 1e9 for _, num_bytes in points], where="post", label=name)


def _draw_lanes(axis: Axes, line: TimeLine, start_s: float, end_s: float, scale_s: float) -> None:
    """Draw a row for each lane, cut at both ends."""
    lanes = [lane for lane in line.lanes if line.use(lane).busy_s]
    for row, lane in enumerate(reversed(lanes)):
        idle_s = 0.0
        for gap_start_s, gap_end_s in line.idle(lane):
            left, right = max(gap_start_s, start_s), min(gap_end_s, end_s)
            if right > left:
                idle_s += right - left
                bar = [(1000 * (left - start_s), 1000 * (right - left))]
                height = (row - 0.4, 0.8)
                axis.broken_barh(bar, height, facecolor=IDLE_FACE, edgecolor=IDLE_HATCH, hatch="//", linewidth=0)
        for one in line.lanes[lane]:
            left, right = max(one.start_s, start_s), min(one.end_s, end_s)
            if right <= left:
                continue
            bar = [(1000 * (left - start_s), 1000 * (right - left))]
            colour = TASK_COLOURS.get(one.task.op, OTHER_COLOUR)
            edge = 0.4 if right - left > 0.003 * scale_s else 0.0  # which would hide thin lines
            axis.broken_barh(bar, (row - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=edge)
            if one.task.micro_batch is not None and right - left > 0.012 * scale_s:
                middle = 500 * (left + right - 2 * start_s)
                axis.text(middle, row, str(one.task.micro_batch + 1), ha="center", va="center", fontsize=6)
        share = idle_s / (end_s - start_s) if end_s > start_s else 0.0
        axis.text(1000 * (end_s - start_s), row, f" {share:.0%} idle", va="center", fontsize="small")
    axis.set_yticks(range(len(lanes)), [lane.replace("_", " ") for lane in reversed(lanes)])
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, file: Path) -> None:
    """Write a picture, and its folder if that is not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Software": None})  # the same picture from the same data


def _draw(axis: Axes, name: str, colour: str, points: Sequence[tuple[int, float]], quantiles: Quantiles) -> None:
    """Draw each request as a dot, and quantiles of ranges of lengths with equally many requests."""
    xs, ys = zip(*points, strict=True)
    axis.scatter(xs, ys, s=8, alpha=0.35, color=colour, linewidths=0, label=name)
    ordered = sorted(points)
    num_ranges = max(min(MAX_RANGES, len(ordered) // MIN_IN_RANGE), 1)
    for number in range(num_ranges):
        part = ordered[number * len(ordered) // num_ranges : (number + 1) * len(ordered) // num_ranges]
        for percent, style in quantiles:
            height = percentile([latency for _, latency in part], percent)
            axis.hlines(height, part[0][0], part[-1][0], colors=colour, linestyles=style, linewidth=2)
