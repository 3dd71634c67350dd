"""Records of `page_load.py` as tables."""

from __future__ import annotations

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text

COLUMNS = {
    "score": ("score", 0),
    "first_contentful_paint_s": ("first paint s", 2),
    "largest_contentful_paint_s": ("largest paint s", 2),
    "speed_index_s": ("speed index s", 2),
    "total_blocking_time_s": ("blocked s", 2),
    "layout_shift": ("layout shift", 3),
}


def table(record: Record) -> Table:
    """Return a row for each kind of device."""
    rows = tuple(
        (
            device["name"],
            *(spread_text([run[name] for run in device["runs"]], digits) for name, (_, digits) in COLUMNS.items()),
        )
        for device in record["devices"]
    )
    title = f"The page's first load, by Lighthouse {record['lighthouse']}"
    note = (
        f"Chromium {record['browser']}. Lighthouse simulates a slow phone or a desktop computer, so its seconds are "
        "not those of this machine. The score of 100 is its best."
    )
    return Table(title, ("device", *(title for title, _ in COLUMNS.values())), rows, (note,))
