"""Records of `page_streaming.py` as tables, without the browser that measures."""

from __future__ import annotations

from moeflow.bench.records import Record
from moeflow.bench.tables import Table

FRAME_MS = 1000 / 60


def table(record: Record) -> Table:
    """Return the quarters of one stream."""
    rows = tuple(
        (
            row["name"],
            f"{row['frames_per_s']:.1f}",
            *(f"{row[name]:.1f}" for name in ("median_ms", "p99_ms", "worst_ms")),
            f"{row['late_share']:.1%}",
            f"{len(row['long_tasks_ms'])} ({sum(row['long_tasks_ms']):.0f} ms)",
            *(f"{row[f'{name}_share']:.1%}" for name in ("busy", "script", "style", "layout")),
            f"{row['num_nodes']:.0f}",
        )
        for row in record["quarters"]
    )
    columns = ("", "frames/s", "median ms", "99% ms", "worst ms", "late", "long tasks")
    about = "a small window, the processor slowed down four times" if record["is_phone"] else "a large window"
    title = f"The page while {record['num_tokens']:,} tokens come, {record['rate']:g} a second: {about}"
    note = (
        f"Chromium {record['browser']}, without a GPU. Late: frames after more than one and a half of {FRAME_MS:.1f} "
        "ms; long tasks: over 50 ms; the last columns are shares of the time, and the document's nodes."
    )
    return Table(title, (*columns, "busy", "scripts", "style", "layout", "nodes"), rows, (note,))
