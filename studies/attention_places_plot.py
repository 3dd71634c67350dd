"""Records of `attention_places.py` as a picture. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from moeflow.bench.plots import save
from moeflow.bench.records import Record
from studies.attention_places import fetch_ms
from studies.harness.plots import draw_spreads


def plot_places(records: Sequence[Record], file: Path) -> None:
    """Draw the times of attending and fetching over contexts, one panel for each micro-batch, on log scales."""
    sizes = sorted({record["micro_batch"] for record in records})
    figure = Figure(figsize=(3.2 * len(sizes), 3.6), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axis, size in zip(panels, sizes, strict=True):
        chosen = {record["context"]: record for record in records if record["micro_batch"] == size}
        ways = {
            "attend on the host": {context: record["attend_ms"] for context, record in chosen.items()},
            "fetch: gather and cross": {context: fetch_ms(record) for context, record in chosen.items()},
            "cross the link": {context: record["cross_ms"] for context, record in chosen.items()},
        }
        for label, points in ways.items():
            draw_spreads(axis, points, label=label, linestyle=":" if label.startswith("cross") else "-")
        for context, record in chosen.items():
            fetch, attend = statistics.median(fetch_ms(record)), statistics.median(record["attend_ms"])
            place = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "fontsize": "small"}
            axis.annotate(f"{fetch / attend:.1f}x", (context, fetch), **place)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sorted(chosen), [str(context) for context in sorted(chosen)])
        axis.margins(0.15, 0.15)
        axis.set_title(f"{size} requests", fontsize="medium")
        axis.set_xlabel("context, tokens")
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("time of a layer, ms")
    panels[0].legend(fontsize="small")
    first = records[0]
    figure.suptitle(f"Keys and values in main memory: {first['shape']}, {first['device']}", fontsize="medium")
    save(figure, file)
