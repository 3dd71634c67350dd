"""The study's picture: how far ahead drafts are right, and what that makes of the speed."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moeflow.bench.plots import save
from moeflow.bench.records import Record
from studies.speculation.tables import by_depth


def plot_speculation(record: Record, file: Path) -> None:
    """Draw the share of right drafts by depth, a line a speculator, and speed-ups by set of prompts with their spread.

    What drafts a fixed number of tokens a pass is left out.
    """
    arms = [arm for arm in record["arms"] if arm["size"] is None]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    depth_axis, speed_axis = figure.subplots(1, 2)
    colours = {arm["name"]: f"C{number}" for number, arm in enumerate(arms)}
    for arm in arms:
        for speculator, drafted, accepted in by_depth(arm):
            places = [depth for depth, made in enumerate(drafted, start=1) if made]
            shares = [100 * accepted[depth - 1] / drafted[depth - 1] for depth in places]
            is_alone = speculator == arm["name"]
            colour = colours.get(speculator, colours[arm["name"]])
            label = speculator if is_alone else f"{speculator}, of {arm['name']}"
            depth_axis.plot(places, shares, "-" if is_alone else ":", marker=".", color=colour, label=label)
    depth_axis.set_xlabel("tokens ahead")
    depth_axis.set_ylabel("right, % of the drafts computed")
    depth_axis.set_ylim(0, 100)
    depth_axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        sets = arm["sets"]
        lefts = [at + (number - (len(arms) - 1) / 2) * width for at in range(len(sets))]
        middle = [one["speedup"] for one in sets]
        below = [max(one["speedup"] - one["speedup_low"], 0.0) for one in sets]
        above = [max(one["speedup_high"] - one["speedup"], 0.0) for one in sets]
        speed_axis.bar(
            lefts, middle, width, yerr=[below, above], capsize=3, color=colours[arm["name"]], label=arm["name"]
        )
    speed_axis.axhline(1, color="0.4", linewidth=1)
    speed_axis.set_xticks(range(len(arms[0]["sets"])), [one["set"] for one in arms[0]["sets"]])
    speed_axis.set_ylabel("speed-up; lines: middle half of the prompts")
    for axis in (depth_axis, speed_axis):
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, frameon=False)
    figure.suptitle(f"Drafts for {record['model']}, {record['weight_format']}")
    save(figure, file)
