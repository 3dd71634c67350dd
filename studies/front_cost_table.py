"""The processor time of HTTP processes as a table."""

from __future__ import annotations

from moeflow.bench.records import Record
from moeflow.bench.tables import Table

_NUMBERS = ("server_us", "fronts_us", "tokens_per_s")


def table(record: Record) -> Table:
    """Return the processor times."""
    rows = [
        (it["channel"], it["path"], str(it["streams"]), *(f"{it[name]:.0f}" for name in _NUMBERS))
        for it in record["rounds"]
    ]
    columns = ("channel", "endpoint", "streams", "server, us a token", "fronts, us a token", "tokens/s")
    return Table(f"Processor time for a streamed token, {record['fronts']} front(s)", columns, tuple(rows))
