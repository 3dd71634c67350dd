"""Records of models larger than memory as tables."""

from __future__ import annotations

import statistics
from typing import Any

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from studies.offload.contestants import BIGMOE, IK_LLAMA_CPP, OURS, PEER, UNPREDICTED


def offload_table(record: Record) -> Table:
    """Return everyone's speed, memory and waiting within each budget."""
    rows = [_row(budget, row) for budget in record["budgets"] for row in budget["rows"]]
    resident = record["resident"]
    rates = spread_text(resident["prefill"]), "", spread_text(resident["decode"], 2)
    rows.append(("all in memory, moeflow", *rates, *[""] * 6))
    columns = (
        "share of the model in memory",
        "prefill, tokens/s",
        "/ llama.cpp",
        "decode, tokens/s",
        "/ llama.cpp",
        "decode, first prompt",
        "read a token",
        "peak / budget",
        "hits",
        "read per turn",
    )
    is_equal = all(row["is_equal"] for budget in record["budgets"] for row in budget["rows"])
    notes = [
        f"{record['model_bytes'] / 1e9:.1f} GB in {record['format']}; prompts of {record['prompt_len']} tokens of "
        f"{record['workload']}, {record['new_tokens']} after each, one request at a time, "
        f"{len(resident['decode'])} turns. Peak is resident memory; the budget also limits page cache, from outside.",
        "Ours answered as with all in memory, token for token."
        if is_equal
        else "Ours did NOT answer as with all in memory.",
        *_beside_others(record),
        *_prediction(record),
    ]
    title = f"A model larger than memory: {record['workload']}, median (min-max)"
    return Table(title, columns, tuple(rows), tuple(notes))


def _row(budget: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    by_name = {each["name"]: each for each in budget["rows"]}
    return (
        f"{budget['share']:.0%}, {row['name']}",
        spread_text(row["prefill"]),
        _ratio(by_name, row, "prefill"),
        spread_text(row["decode"], 2),
        _ratio(by_name, row, "decode"),
        *_cold_and_read(row),
        f"{row['peak_bytes'] / budget['bytes']:.0%}",
        *_experts(row),
    )


def _ratio(by_name: dict[str, dict[str, Any]], row: dict[str, Any], what: str) -> str:
    """Return ours / llama.cpp, the median of turns; nothing for llama.cpp itself."""
    if PEER not in by_name or row["name"] == PEER:
        return ""
    return f"{_median_ratio(row[what], by_name[PEER][what]):.2f}"


def _median_ratio(ours: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, others, strict=True))


def _cold_and_read(row: dict[str, Any]) -> tuple[str, str]:
    """Return the rate after the first prompt, which found nothing in memory, and the bytes read a token after others.

    Nothing for a record of before these were kept.
    """
    if "first" not in row:
        return "", ""
    read = statistics.median(row["decode_read_per_token"])
    return spread_text(row["first"]["decode"], 2), f"{read / 1e6:.1f} MB"


def _experts(row: dict[str, Any]) -> tuple[str, str]:
    """Return the share of needed experts that were there, and the bytes read in a turn."""
    if not row["turns"] or not row["turns"][0]:
        return "", ""
    total = {name: sum(turn[name] for turn in row["turns"]) for name in row["turns"][0]}
    needed = total["expert_hits_total"] + total["expert_late_total"] + total["expert_misses_total"]
    read = total["expert_demand_bytes_total"] + total["expert_prefetched_bytes_total"]
    return f"{total['expert_hits_total'] / max(needed, 1):.0%}", f"{read / len(row['turns']) / 1e9:.1f} GB"


def _beside_others(record: Record) -> list[str]:
    """Compare our engine with the peers that have no column of their own."""
    notes = []
    for budget in record["budgets"]:
        by_name = {row["name"]: row for row in budget["rows"]}
        if OURS not in by_name:
            continue
        for name in (each for each in (IK_LLAMA_CPP, BIGMOE) if each in by_name):
            prefill, decode = (_median_ratio(by_name[OURS][it], by_name[name][it]) for it in ("prefill", "decode"))
            notes.append(f"At {budget['share']:.0%}, ours / {name}: prefill {prefill:.2f}, decode {decode:.2f}.")
    return notes


def _prediction(record: Record) -> list[str]:
    """Describe the gain from prediction."""
    notes = []
    for budget in record["budgets"]:
        by_name = {row["name"]: row for row in budget["rows"]}
        if OURS in by_name and UNPREDICTED in by_name:
            ratio = _median_ratio(by_name[OURS]["decode"], by_name[UNPREDICTED]["decode"])
            notes.append(f"At {budget['share']:.0%}, decode with prediction is {ratio:.2f} times that without.")
    return notes
