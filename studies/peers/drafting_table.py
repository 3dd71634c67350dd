"""A record of drafted tokens, ours and llama.cpp's, as a table."""

from __future__ import annotations

from typing import Final

from moeflow.bench.records import Record
from moeflow.bench.tables import Table

PLAIN: Final = "none"  # drafts
ALL_SETS: Final = "all"


def drafting_table(record: Record) -> Table:
    """Return a record as a table, a row an engine and what drafts."""
    names = [one["set"] for one in record["rows"][0]["sets"] if one["set"] != ALL_SETS]
    rows = []
    for row in record["rows"]:
        by_set = {one["set"]: one for one in row["sets"]}
        total = by_set[ALL_SETS]
        passes = max(total["passes"], 1)
        is_plain = row["drafts"] == PLAIN
        speed_up = f"{total['speedup']:.2f} ({total['speedup_low']:.2f}-{total['speedup_high']:.2f})"
        rows.append(
            (
                f"{row['engine']}, {row['drafts']}",
                f"{total['tokens_per_s']:.1f}",
                "" if is_plain else speed_up,
                "" if is_plain else f"{total['accepted'] / passes:.2f} of {total['drafted'] / passes:.2f}",
                *("" if is_plain else f"{by_set[name]['speedup']:.2f}" for name in names),
            )
        )
    versions = ", ".join(f"{name} {version}" for name, version in record["peer_versions"].items())
    title = f"{record['target']} with {record['draft']}; llama.cpp from {versions}"
    notes = (
        f"{record['num_prompts']} prompts, {record['rounds']} rounds, greedy answers of at most {record['new_tokens']} "
        f"tokens; of {record['num_prompts'] * record['rounds']} plain answers {record['num_same']} were the same in "
        "both engines. A speed-up is over the engine's own plain decoding.",
    )
    columns = ("", "tokens/s", "speed-up (middle half)", "right a pass, of drafts", *names)
    return Table(title, columns, tuple(rows), notes)
