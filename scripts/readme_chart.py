"""Draws docs/images/speed.svg, the chart of the README, from the records in docs/studies/results. Measures nothing.

python scripts/readme_chart.py
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from moeflow.bench.records import Record, read  # noqa: E402

RESULTS = ROOT / "docs" / "studies" / "results"
CHART = ROOT / "docs" / "images" / "speed.svg"
OURS, OTHERS = "#1f6feb", "#b8c0cc"
PEERS = ("llama.cpp", "ik_llama.cpp")
FORMATS = {"int8": "8 bits", "q4_k_m": "Q4_K_M", "int4": "Q4_0"}
DECODE = "decode, batch 1"
SHARE = 0.5  # of the model in memory


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, its value, and whether it is moeflow's."""

    label: str
    value: float
    is_ours: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """One group of bars."""

    title: str
    bars: tuple[Bar, ...]
    unit: str = ""


def panels(records: Sequence[Record]) -> list[Panel]:
    """Return the panels: decode in memory, decode with half of the model in memory, error of plans."""
    newest = sorted(records, key=lambda record: record["time"], reverse=True)
    decode = tuple(bar for name in FORMATS for bar in _decode_bars(newest, name))
    return [
        Panel("Decode, one request: tokens/s", decode),
        Panel("Half of the model in memory: tokens/s", tuple(_offload_bars(newest))),
        Panel("Plans: median error of speeds", tuple(_error_bars(newest)), "%"),
    ]


def _decode_bars(newest: Sequence[Record], name: str) -> Iterator[Bar]:
    """Yield the bars of the newest run of moeflow and both other engines, interleaved."""
    runs: dict[str, dict[str, Record]] = {}
    for record in newest:
        if record["kind"] == "peers" and record["format"] == name and _rates(record, "ours"):
            engine, _, build = record["peer"].partition(" ")
            if "AVX2" not in build:
                runs.setdefault(str(_rates(record, "ours")), {})[engine] = record
    run = next(run for run in runs.values() if run.keys() >= set(PEERS))
    yield Bar(f"{FORMATS[name]}, moeflow", statistics.median(_rates(run[PEERS[0]], "ours")))
    for engine in PEERS:
        yield Bar(f"{FORMATS[name]}, {engine}", statistics.median(_rates(run[engine], "peer")), is_ours=False)


def _rates(record: Record, engine: str) -> list[float]:
    return next((row[engine] for row in record["rows"] if row["name"] == DECODE), [])


def _offload_bars(newest: Sequence[Record]) -> Iterator[Bar]:
    """Yield the bars of the newest run with other engines."""
    run = next(record for record in newest if record["kind"] == "offload" and "BigMoeOnEdge" in str(record["budgets"]))
    budget = next(budget for budget in run["budgets"] if budget["share"] == SHARE)
    for row in budget["rows"]:
        name = row["name"].removesuffix(", prefetching")
        yield Bar(name, statistics.median(row["decode"]), is_ours=name.startswith("moeflow"))


def _error_bars(newest: Sequence[Record]) -> Iterator[Bar]:
    """Yield a bar for each machine whose plans were validated."""
    found = {record["machine"]["cpu"]: record for record in reversed(newest) if record["kind"] == "plan_accuracy"}
    for cpu, record in found.items():
        rows = [row for rows in record["cases"].values() for row in rows]
        errors = [abs(row["error"]) for row in rows if row["unit"] in ("tokens/s", "ms")]
        yield Bar(cpu.replace("(R)", "").removesuffix(" Processor"), 100 * statistics.median(errors))


def text_of(bar: Bar, unit: str) -> str:
    """Return the number at the end of a bar."""
    return f"{bar.value:.3g}{unit}"


def draw(found: Sequence[Panel], file: Path) -> None:
    """Write the chart. Text stays text, and equal records give equal bytes."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moeflow", "font.size": 9}):
        figure = Figure(figsize=(8.2, 4.2), layout="constrained")
        places = figure.subplot_mosaic([["a", "b"], ["a", "b"], ["a", "c"]])
        for place, panel in zip("abc", found, strict=True):
            _draw_panel(places[place], panel)
        figure.savefig(file, metadata={"Date": None})


def _draw_panel(axes: Axes, panel: Panel) -> None:
    drawn = axes.barh(
        [bar.label for bar in panel.bars],
        [bar.value for bar in panel.bars],
        color=[OURS if bar.is_ours else OTHERS for bar in panel.bars],
    )
    axes.bar_label(drawn, [text_of(bar, panel.unit) for bar in panel.bars], padding=3)
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelbottom=False)


if __name__ == "__main__":
    draw(panels(read(sorted(RESULTS.glob("*.jsonl")))), CHART)
