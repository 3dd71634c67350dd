"""Records of `engine_vs_transformers.py` as one table: a row for each family whose random model was measured.

Such a model's folder has the name of its family.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from moeflow.models.registry import FAMILIES

FIRST, LAST = "decode, batch 1", "decode, batch 32"
CASES = (FIRST, LAST)


def families_table(records: Sequence[Record]) -> Table:
    """Return both engines' rates by family, where ours is most times as fast at batch 1 first."""
    has_floors = any(floor(record, LAST) is not None for record in records)
    rows = []
    for record in sorted(records, key=lambda it: -statistics.median(ratios(case_of(it, FIRST)))):
        row = [record["model"]]
        for case in (case_of(record, name) for name in CASES):
            rates = case["tokens_per_s"]
            row += [spread_text(rates["moeflow"]), spread_text(rates["transformers"]), spread_text(ratios(case), 2)]
        if has_floors:
            allowed = floor(record, LAST)
            row.append("" if allowed is None else f"{allowed:.0f}")
        rows.append(tuple(row))
    columns = ["family"]
    for size in ("1", "32"):
        columns += [f"moeflow, {size}", f"transformers, {size}", f"ratio, {size}"]
    if has_floors:
        columns.append("bandwidth allows, 32")
    title = "Families, random models, bfloat16, tokens/s at batch 1 and 32: median (min-max)"
    return Table(title, tuple(columns), tuple(rows), (_note(records),))


def is_family(record: Record) -> bool:
    """Whether a record belongs into the table."""
    names = {case["name"] for case in record["cases"]}
    return record["model"] in FAMILIES and record["weight_format"] == "bfloat16" and names >= set(CASES)


def case_of(record: Record, name: str) -> Mapping[str, Any]:
    """Return the measurements of a case."""
    return next(case for case in record["cases"] if case["name"] == name)


def ratios(case: Mapping[str, Any]) -> list[float]:
    """Return ours / transformers' of each turn."""
    rates = case["tokens_per_s"]
    return [ours / theirs for ours, theirs in zip(rates["moeflow"], rates["transformers"], strict=True)]


def floor(record: Record, name: str) -> float | None:
    """Return the tokens/s at which reading a case's weights takes all the bandwidth; None where it was not recorded."""
    case, read = case_of(record, name), record.get("read_bytes_per_s")
    if not read or case.get("num_bytes") is None:
        return None
    tokens = case["batch_size"] * case["new_tokens"]
    return float(tokens * statistics.median(read) / case["num_bytes"])


def _note(records: Sequence[Record]) -> str:
    """Describe a row."""
    cases = [case_of(record, name) for record in records for name in CASES]
    equal, all_answers = (sum(int(case["equal_answers"].split("/")[part]) for case in cases) for part in (0, 1))
    about = cases[0]
    return (
        f"Each row is a model of `python -m studies.random_family FAMILY FAMILY`; a rate is of the whole call, "
        f"{about['prompt_len']} tokens of prompt and {about['new_tokens']} new ones a request. {equal:,} of "
        f"{all_answers:,} answers were equal to the last token: of random weights, the likeliest tokens often lie "
        "closer than two ways of rounding to bfloat16."
    )


def versus_table(record: Record) -> Table:
    """Return a record of `python -m studies.engine_vs_transformers` as a table."""
    rows = []
    for case in record["cases"]:
        rates = case["tokens_per_s"]
        ratios = [ours / theirs for ours, theirs in zip(rates["moeflow"], rates["transformers"], strict=True)]
        both = (spread_text(rates["moeflow"]), spread_text(rates["transformers"]))
        rows.append((case["name"], *both, spread_text(ratios, 2), case["equal_answers"]))
    columns = ("", "moeflow", "transformers generate", "ratio", "equal answers")
    return Table(f"{record['model']}, {record['weight_format']}, tokens/s: median (min-max)", columns, tuple(rows))
