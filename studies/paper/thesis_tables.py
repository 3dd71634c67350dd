"""ExpertFlow's published figures beside simulated ones, and beside measured ones: never in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from studies.paper.thesis import (
    CONTINUOUS,
    EXPERTFLOW,
    FASTER_TRANSFORMER,
    FITTED_RATE,
    LENGTH,
    LENGTH_STEP,
    PUBLISHED,
    RATES,
    STATIC,
    SYSTEMS,
    TERMS,
    Published,
    Run,
)
from studies.paper.thesis_measured import SUSTAINED

FITTED: Final = " (fitted)"
SPECULATION: Final = (1.91, 2.75)  # speed-ups of figure 6.6
SPECULATION_STUDY: Final = "python -m studies.speculation"
RANGES: Final = tuple(f"{end - LENGTH_STEP + 1}-{end}" for end in range(LENGTH_STEP, LENGTH + 1, LENGTH_STEP))


def simulated_tables(record: Record) -> list[Table]:
    """Return tables 6.1 to 6.3, figures 6.2 to 6.5, and the effect of each term."""
    runs = {(run["system"], run["rate"]): run for run in record["runs"] if run["term"] == TERMS[-1]}
    return [
        _rates("Table 6.1, simulated: requests/s", runs, "requests_per_s", record),
        _rates("Table 6.2, simulated: generated tokens/s", runs, "tokens_per_s", record),
        _latencies(runs, record),
        _by_length("Figures 6.2 to 6.5, simulated", {(SYSTEMS[name], rate): it for (name, rate), it in runs.items()}),
        _terms(record),
    ]


def _rates(title: str, runs: dict[Any, Run], name: str, record: Record) -> Table:
    rows = []
    for rate in RATES:
        cells, ratios = [], []
        for system in SYSTEMS:
            ours, published = runs[system, rate][name], PUBLISHED.get((system, rate))
            is_fitted = system == FASTER_TRANSFORMER and rate == FITTED_RATE["static batch"]
            theirs = float(getattr(published, name)) if published else None
            cells += [f"{theirs:.1f}" if theirs else "", f"{ours:.1f}", _off(ours, theirs) + FITTED * is_fitted]
            ratios.append((theirs, ours))
        (theirs, ours), (their_static, our_static) = ratios
        published_ratio = f"{theirs / their_static:.2f}" if theirs and their_static else ""
        rows.append((f"{rate} requests/s", *cells, published_ratio, f"{ours / our_static:.2f}"))
    columns = ("arrivals", "ExpertFlow", "ours", "off by", "FasterTransformer", "ours", "off by", "ratio", "ours")
    tried = ", ".join(f"{rows} rows {rate:.1f}" for rows, rate in record["static_rates"].items())
    note = (
        f"Static batches have {record['static_batch']} rows, fitted to {FITTED_RATE['static batch']} requests/s "
        f"(requests/s with {tried}). No other rate is fitted."
    )
    return Table(title, columns, tuple(rows), (note,))


def _latencies(runs: dict[Any, Run], record: Record) -> Table:
    rows = []
    for rate in RATES:
        for system in SYSTEMS:
            published = PUBLISHED.get((system, rate))
            wait_s = record["wait_s"] if system == EXPERTFLOW else 0.0
            cells = [f"{rate} requests/s, {system}"]
            for number, name in enumerate(("latency_avg_s", "latency_min_s", "latency_max_s")):
                ours = runs[system, rate][name] + wait_s
                theirs = published.latency_ms[number] / 1e3 if published else None
                is_fitted = (system, rate, number) == (EXPERTFLOW, FITTED_RATE["wait"], 1)
                cells += [f"{theirs:.2f}" if theirs else "", f"{ours:.2f}", _off(ours, theirs) + FITTED * is_fitted]
            rows.append(tuple(cells))
    columns = ("arrivals", "average", "ours", "off by", "least", "ours", "off by", "most", "ours", "off by")
    notes = (
        f"ExpertFlow's simulated latencies include {record['wait_s']:.2f} s, fitted to its least latency at "
        f"{FITTED_RATE['wait']} requests/s. It is no computing time. The published run ends 1.8 s after its last "
        "arrival is due, but no request takes less than 5.6 s.",
        *_shorter(runs, record),
    )
    return Table("Table 6.3, simulated: latency of a request, s", columns, tuple(rows), notes)


def _shorter(runs: dict[Any, Run], record: Record) -> list[str]:
    """Return by how much ExpertFlow's average latency is shorter."""
    notes = []
    for rate in RATES[1:]:
        ours, static = (runs[system, rate]["latency_avg_s"] for system in SYSTEMS)
        theirs, their_static = (PUBLISHED[system, rate].latency_ms[0] / 1e3 for system in SYSTEMS)
        wait_s = record["wait_s"]
        notes.append(
            f"Average latency of ExpertFlow beside FasterTransformer's at {rate} requests/s: published "
            f"{theirs / their_static - 1:+.0%}, {(theirs - wait_s) / their_static - 1:+.0%} without these seconds; "
            f"simulated {(ours + wait_s) / static - 1:+.0%}, {ours / static - 1:+.0%} without them."
        )
    return notes


def _by_length(title: str, runs: dict[tuple[str, int], Run]) -> Table:
    rows = []
    for rate in RATES:
        for policy in (CONTINUOUS, STATIC):
            run = runs[policy, rate]
            cells = [
                f"{median:.2f} ({low:.2f}-{high:.2f})" if it else ""
                for it in run["by_length"]
                for low, median, high in [it or (0.0, 0.0, 0.0)]
            ]
            rows.append((f"{rate} requests/s, {policy}", *cells, f"{run['follows_length']:.2f}"))
    columns = ("arrivals", *(f"{it} tokens" for it in RANGES), "correlation")
    follows = all(runs[CONTINUOUS, rate]["follows_length"] > runs[STATIC, rate]["follows_length"] for rate in RATES)
    notes = (
        f"{'Holds' if follows else 'Does not hold'}: latency follows the length of a request more closely with "
        "continuous batches than with static ones, at each rate.",
        "Seconds by the length of prompt and answer: median (10th to 90th percentile), and latency's correlation with "
        "it.",
    )
    return Table(title, columns, tuple(rows), notes)


def _terms(record: Record) -> Table:
    rows = []
    for rate in RATES:
        found = {run["term"]: run for run in record["runs"] if (run["system"], run["rate"]) == (EXPERTFLOW, rate)}
        published = PUBLISHED[EXPERTFLOW, rate]
        own_s = published.latency_ms[0] / 1e3 - record["wait_s"]
        cells = [
            f"{run['requests_per_s']:.1f} ({_off(run['requests_per_s'], published.requests_per_s)}), "
            f"{run['latency_avg_s']:.2f} ({_off(run['latency_avg_s'], own_s)})"
            for run in (found[term] for term in TERMS)
        ]
        rows.append((f"{rate} requests/s", f"{published.requests_per_s:.1f}, {own_s:.2f}", *cells))
    columns = ("arrivals", "published", *(f"+ {term}" if number else term for number, term in enumerate(TERMS)))
    note = "Requests/s and average latency in s, without the fitted seconds. No term is fitted."
    return Table("What each term changes in ExpertFlow's simulated figures", columns, tuple(rows), (note,))


def _off(ours: float, theirs: float | None) -> str:
    return f"{ours / theirs - 1:+.0%}" if theirs else ""


def measured_tables(record: Record) -> list[Table]:
    """Return the measured counterparts of the tables and figures."""
    runs = {(run["policy"], run["rate"]): run for run in record["runs"]}
    rows = []
    for rate in RATES:
        both = [runs[policy, rate] for policy in (CONTINUOUS, STATIC)]
        published = [PUBLISHED.get((system, rate)) for system in SYSTEMS]
        rows.append(
            (
                f"{both[0]['measured_rate']:.1f} requests/s (as {rate})",
                *(f"{run[name]:.{digits}f}" for name, digits in _MEASURED for run in both),
                _published_ratio(published, lambda it: it.requests_per_s),
                f"{both[0]['requests_per_s'] / both[1]['requests_per_s']:.2f}",
                _published_ratio(published, lambda it: it.latency_ms[0]),
                f"{both[0]['latency_avg_s'] / both[1]['latency_avg_s']:.2f}",
            )
        )
    columns = (
        "arrivals",
        *(f"{label}, {policy}" for label in ("requests/s", "tokens/s", "latency s") for policy in (CONTINUOUS, STATIC)),
        "requests/s, ratio published",
        "ours",
        "latency, ratio published",
        "ours",
    )
    notes = (
        "GPT-MoE with a quarter of the layers, widths, heads and experts, and random weights in "
        f"{record['weight_format']}; {record['num_requests']} requests a run, {record['max_seqs']} rows in a batch. "
        "Seconds are processor time of one thread.",
        "Rates are the published ones relative to the sustained rate: "
        f"{record['sustained_per_s']:.1f} requests/s here, {SUSTAINED} published.",
    )
    return [
        Table("Tables 6.1 to 6.3, measured here: a small GPT-MoE", columns, tuple(rows), notes),
        _by_length("Figures 6.2 to 6.5, measured here: a small GPT-MoE", runs),
    ]


_MEASURED: Final = (("requests_per_s", 2), ("tokens_per_s", 0), ("latency_avg_s", 2))


def _published_ratio(published: Sequence[Published | None], of: Callable[[Published], float]) -> str:
    ours, static = published
    return f"{of(ours) / of(static):.2f}" if ours and static else ""


def speculation_table(record: Record) -> Table:
    """Return figure 6.6 beside a record of `python -m studies.speculation`."""
    free = [arm for arm in record["arms"] if arm["size"] is None]
    low, high = SPECULATION
    rows = []
    for place, one in enumerate(free[0]["sets"]):
        best = max(free, key=lambda arm: arm["sets"][place]["speedup"])
        rows.append((one["set"], f"{low:.2f} to {high:.2f}", f"{best['sets'][place]['speedup']:.2f}", best["name"]))
    note = (
        f"Recorded {record['time'][:10]} by `{SPECULATION_STUDY}`, with {record['model']}. Published are five "
        "sets of prompts, a target of 7 billion parameters and drafts of 160 million; the text has their range alone."
    )
    return Table(
        "Figure 6.6, recorded here: speed-up by drafts", ("prompts", "published", "ours", "by"), tuple(rows), (note,)
    )
