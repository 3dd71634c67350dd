"""Records as tables, the same for the terminal and for the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moeflow.bench.metrics import Spread
from moeflow.bench.records import Record
from moeflow.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Table:
    """Text in rows; the first column is what a row is about, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        """Write it as Markdown: title in bold, table, notes."""
        lines = [f"**{self.title}**", ""]
        lines += [_markdown_row(self.columns), _markdown_row(["---", *["---:"] * (len(self.columns) - 1)])]
        lines += [_markdown_row(row) for row in self.rows]
        lines += [line for note in self.notes for line in ("", note)]
        return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def spread_text(values: Sequence[float], digits: int = 1) -> str:
    """Write median and range: "12.3 (11.9-12.8)"; a single value alone."""
    spread = Spread.of(values)
    if len(values) == 1:
        return f"{spread.median:.{digits}f}"
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def engine_table(record: Record) -> Table:
    """Return a `bench engine` record as a table."""
    read, flops = record["read_bytes_per_s"], record["fp32_flops_per_s"]
    rows = []
    for case in record["cases"]:
        row = [case["name"], spread_text(case["tokens_per_s"])]
        runs_per_s = statistics.median(case["tokens_per_s"]) / case["num_tokens"]
        if read:
            floor = case["num_tokens"] * statistics.median(read) / case["num_bytes"]
            row += [f"{floor:.1f}", f"{case['num_bytes'] * runs_per_s / statistics.median(read):.0%}"]
            row += [f"{case['num_flops'] * runs_per_s / statistics.median(flops):.0%}"]
        else:
            row += ["", "", ""]
        rows.append(tuple(row))
    columns = ("", "tokens/s", "bandwidth allows", "of bandwidth", "of fp32 peak")
    memory = record["memory"]
    notes = [
        f"Loaded in {record['load_s']:.2f} s. Resident {format_bytes(memory['loaded_bytes'])}"
        + (f", at most {format_bytes(memory['peak_bytes'])}" if memory["peak_bytes"] else "")
        + f"; {format_bytes(memory['before_bytes'])} before the model, weights {format_bytes(record['weight_bytes'])}, "
        f"KV cache {format_bytes(record['kv_cache_bytes'])}."
    ]
    if read:
        notes.append(
            f"This machine reads {spread_text([value / 1e9 for value in read])} GB/s "
            f"and computes {spread_text([value / 1e9 for value in flops], 0)} GFLOP/s in float32 "
            f"with {record['machine']['threads']} threads."
        )
    notes += [f"Not run: {name}: {reason}." for name, reason in record["skipped"].items()]
    if not record["is_complete"]:
        notes.append("Interrupted: not all repetitions were made.")
    title = f"{record['model']['name']}, weights in {record['weight_format']}, {record['device']}: median (min-max)"
    return Table(title, columns, tuple(rows), tuple(notes))
