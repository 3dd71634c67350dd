"""Records of a model larger than its GPU as a table, with published figures of other programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text, threads_text
from moeflow.core.units import format_bytes
from studies.hybrid_rivals import rivals


def device_table(records: Sequence[Record]) -> Table:
    """Return each way's tokens/s, and the ratio of its median to that of the baseline."""
    about = records[0]
    measured = [record for record in records if record["speeds"]]
    cases = list(dict.fromkeys(case for record in measured for case in record["speeds"]))
    baseline = next((record["speeds"] for record in measured if record["name"] == about["baseline"]), {})
    columns = ["way"]
    for case in cases:
        columns += [f"{case}, tokens/s", f"/ {about['baseline']}"]
    rows = [(it["name"], *_cells(it["speeds"], cases, baseline), _gpu_share(it)) for it in measured]
    notes = [
        f"{about['model']}, {format_bytes(about['model_bytes'])}, on {about['device']}; {threads_text(about)}. "
        "Ratios are of medians.",
        *(f"Not run: {it['name']}: {it['error']}" for it in records if it["error"]),
        *(f"{it['name']}: version {it['version']}, {it['gpu'] or 'no GPU'}." for it in measured if "version" in it),
    ]
    if not any(record.get("gpu") for record in measured):
        notes += published()
    title = "A model larger than its GPU: median (min-max)"
    return Table(title, (*columns, "choices on the GPU"), tuple(rows), tuple(notes))


def _cells(speeds: dict[str, list[float]], cases: Sequence[str], baseline: dict[str, list[float]]) -> list[str]:
    cells = []
    for case in cases:
        own, other = speeds.get(case), baseline.get(case)
        digits = 1 if own and statistics.median(own) >= 10 else 2
        cells.append(spread_text(own, digits) if own else "")
        cells.append(f"{statistics.median(own) / statistics.median(other):.2f}" if own and other else "")
    return cells


def _gpu_share(record: dict[str, Any]) -> str:
    """Return the share of choices that the GPU computed, in passes of both processors."""
    counted = record.get("counters", {})
    pairs = counted.get("gpu_pairs_total", 0), counted.get("cpu_pairs_total", 0)
    return f"{pairs[0] / sum(pairs):.0%}" if sum(pairs) else ""


def published() -> list[str]:
    """Return lines with published figures: other models and machines, so no ratio is taken."""
    return [
        f"Published, not measured here: {it.name}, on {it.machine.name}: {it.published_text} tokens/s ({it.source})."
        for it in rivals()
    ]


def device_groups(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each model and device, the newest of each way."""
    groups: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in records:
        if record["kind"] == "offload_device":
            key = record["model"], record["device"], str(record["quantize"]), record["baseline"]
            groups.setdefault(key, {})[record["name"]] = record
    return [list(found.values()) for found in groups.values()]
