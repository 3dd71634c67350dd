"""Records of pairs as tables: every pair by itself, and ours compared with the best of all peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from studies.peers.environments import NATIVE

MEMORY = "memory after the first token"
DISTURBED = 0.1  # of a core taken by others, in the median: such a row is marked
RATE = "tokens/s"


def ratios(row: dict[str, Any]) -> list[float]:
    """Return ours / peer of each turn."""
    return [ours / peer for ours, peer in zip(row["ours"], row["peer"], strict=True)]


def foreign_cpu(row: dict[str, Any]) -> float | None:
    """Return how much of a core others took, on the side where it was more; None where it was not watched."""
    sides = [values for values in row["foreign_cpu"].values() if values]
    return max(map(statistics.median, sides)) if sides else None


def is_disturbed(row: dict[str, Any]) -> bool:
    """Whether others computed too much meanwhile for the row to be trusted."""
    return (foreign_cpu(row) or 0.0) > DISTURBED


def pair_table(record: Record) -> Table:
    """Return one pair's rows with ratios and spread."""
    rows = []
    for row in record["rows"]:
        digits = 2 if row["unit"] == "s" else 0 if row["unit"] == "MiB" else 1
        foreign = foreign_cpu(row)
        rows.append(
            (
                f"{row['name']}, {row['unit']}",
                spread_text(row["ours"], digits),
                spread_text(row["peer"], digits),
                spread_text(ratios(row), 2),
                "" if foreign is None else f"{foreign:.2f}{' !' if is_disturbed(row) else ''}",
            )
        )
    notes = [f"Sampling in the timed part: {record['sampling']['ours']} and {record['sampling']['peer']}."]
    if any(map(is_disturbed, record["rows"])):
        notes.append(f"!: other processes took more than {DISTURBED} of a core; do not trust the row.")
    notes += _memory_note(record)
    if read := record.get("read_bytes_per_s"):
        notes.append(f"This machine read {spread_text([value / 1e9 for value in read])} GB/s between the turns.")
    versions = ", ".join(f"{name} {version}" for name, version in record["peer_versions"].items())
    title = f"{record['ours']} and {record['peer']} ({versions}): median (min-max)"
    columns = ("", record["ours"], record["peer"], "ours / peer", "others' CPU")
    return Table(title, columns, tuple(rows), tuple(notes))


def _memory_note(record: Record) -> list[str]:
    """Say what everyone holds beside the size of the file."""
    row = next((row for row in record["rows"] if row["name"] == MEMORY), None)
    if row is None or "file_bytes" not in record:
        return []
    held = []
    for side in ("ours", "peer"):
        file_mib = record["file_bytes"][side] / 2**20
        held.append(f"{record[side]} {statistics.median(row[side]) / file_mib:.2f} of {file_mib:.0f} MiB")
    return [f"{MEMORY.capitalize()}, of the model's file: {', '.join(held)}."]


def summary_table(records: Sequence[Record]) -> Table:
    """Return ours compared with the best peer of the same format and of any, for every measure of speed.

    The first ratio is the median of turns; the second compares medians of different pairs, measured at
    different times.
    """
    rows = []
    for name in _names(records):
        fastest = max(_measured(records, name), key=lambda pair: statistics.median(pair[1]["peer"]))
        for weights in dict.fromkeys(record["format"] for record in records):
            pairs = [pair for pair in _measured(records, name) if pair[0]["format"] == weights]
            if not pairs:
                continue
            ours = statistics.median([value for _, row in pairs for value in row["ours"]])
            record, row = max(pairs, key=lambda pair: statistics.median(pair[1]["peer"]))
            best = statistics.median(fastest[1]["peer"])
            rows.append(
                (
                    f"{name}, {weights}",
                    f"{ours:.1f}",
                    f"{record['peer']} {statistics.median(row['peer']):.1f}",
                    spread_text(ratios(row), 2),
                    f"{fastest[0]['peer']} {best:.1f}",
                    f"{ours / best:.2f}",
                )
            )
    columns = (RATE, "ours", "best peer in the format", "ours / peer", "best peer of all", "ours / peer")
    isas = {record.get("isa", NATIVE) for record in records} - {NATIVE}
    title = ", ".join(["Ours beside the best peer", *(f"{isa.upper()} only" for isa in sorted(isas))])
    return Table(title, columns, tuple(rows))


def _names(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(row["name"] for record in records for row in record["rows"] if row["unit"] == RATE))


def _measured(records: Iterable[Record], name: str) -> list[tuple[Record, dict[str, Any]]]:
    return [(record, row) for record in records for row in record["rows"] if row["name"] == name]
