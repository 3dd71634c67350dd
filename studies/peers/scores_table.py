"""Records of `run.py perplexity` as a table: apart, since measuring imports what takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

from moeflow.bench.records import Record
from moeflow.bench.tables import Table


def scores_table(records: Sequence[Record]) -> Table:
    """Return a row for each file and each that ours is compared with."""
    rows = []
    for record in records:
        for other in record["others"]:
            change = other["ratio"] - 1
            rows.append(
                (
                    f"{record['model']}, {record['format']}",
                    f"{record['perplexity']:.3f}",
                    f"{other['name']} {other['perplexity']:.3f}",
                    f"{change:+.2%} (± {other['std_error']:.2%})",
                    f"{other['same_likeliest_share']:.1%}",
                )
            )
    columns = ("file", "perplexity, ours", "of", "ours is", "same likeliest token")
    note = f"{records[0]['num_tokens']} tokens of the calibration text, in windows of {records[0]['window']}."
    return Table("Perplexity of the same file", columns, tuple(rows), (note,), words=(2,))
