"""The study's record as tables: the paper's table and figure of each is named in its title."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from moeflow.bench.metrics import Spread
from moeflow.bench.records import Record
from moeflow.bench.tables import Table, threads_text
from moeflow.core.units import MIB
from studies.sida.arms import RESIDENT, TURN, WAYS

BASELINES: Final = tuple(way.name for way in WAYS if way.is_baseline)


def sida_tables(records: Sequence[Record]) -> list[Table]:
    """Return all tables: what models and texts are, how well they are predicted, and each one's speeds."""
    return [_models(records), *([_answers(records)] if _predicted(records) else []), *map(_speeds, records)]


def total_bytes(record: Record) -> int:
    """Return what all weights take."""
    return _bytes_with(record, _num_slabs(record))


def idle_shares(record: Record) -> list[float]:
    """Return the share of experts that each text leaves idle (figure 4)."""
    return [1 - used / _num_slabs(record) for used in record["usage"]["used_experts"]]


def baseline_ratio(rows: Sequence[dict[str, Any]], way: str) -> float:
    """Return the throughput of a way over the mean of the baselines', all within one share of experts."""
    rates = {row["way"]: row["texts_per_s"] for row in rows}
    return float(rates[way] / statistics.fmean(rates[name] for name in BASELINES))


def rows_by_share(record: Record) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of each share of experts."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault(row["share"], []).append(row)
    return found


def _num_slabs(record: Record) -> int:
    return int(record["num_layers"] * record["num_experts"])


def _bytes_with(record: Record, num_slots: int) -> int:
    """Return what weights take in memory with so many experts."""
    return int(record["dense_bytes"] + num_slots * record["slab_bytes"])


def _predicted(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["usage"]["hit_rates"] is not None]


def _models(records: Sequence[Record]) -> Table:
    rows = []
    for record in records:
        usage, total = record["usage"], total_bytes(record)
        expert_bytes = total - record["dense_bytes"]
        idle = idle_shares(record)
        texts_per_s = next(row["texts_per_s"] for row in record["rows"] if row["way"] == RESIDENT)
        all_texts_s = len(usage["num_tokens"]) / texts_per_s
        rows.append(
            (
                f"{record['model']}, {record['data']}",
                f"{record['num_layers']} x {record['num_experts']}",
                f"{statistics.fmean(usage['num_tokens']):.0f}",
                f"{total / MIB:.0f}",
                f"{expert_bytes / total:.0%}",
                f"{statistics.fmean(idle):.0%}",
                f"{statistics.fmean(idle) * expert_bytes / total:.0%}",
                f"{usage['routing_s'] / all_texts_s:.1%}",
                f"{usage['predicting_s'] / all_texts_s:.0%}" if usage["hit_rates"] else "",
            )
        )
    columns = (
        "classifier, texts",
        "experts",
        "tokens a text",
        "MiB",
        "of them experts",
        "idle a text",
        "weights spared",
        "choosing",
        "predicting",
    )
    notes = (
        "idle a text: experts that a text does not need. weights spared: if only those were in memory that a text "
        "needs. choosing, predicting: the time of routers and of the network, beside a text's time with all experts in "
        "memory; the network runs in a thread of its own, before the text's turn.",
    )
    return Table("Models and their texts (table 2, figures 2, 3, 4 and 8)", columns, tuple(rows), notes)


def _answers(records: Sequence[Record]) -> Table:
    rows = []
    for record in _predicted(records):
        own = record["answers"]["own"]["right"]
        lossy = [it for name, it in record["answers"].items() if name != "own"]
        figures = [f"{it['right']:.1%}" + (f" ({it['right'] / own:.1%})" if own else "") for it in lossy]
        hits = record["usage"]["hit_rates"]
        same = f"{lossy[-1]['same']:.1%}"
        rows.append(
            (
                f"{record['model']}, {record['data']}",
                f"{own:.1%}",
                *figures,
                same,
                f"{hits['1']:.1%}",
                f"{hits['3']:.1%}",
            )
        )
    columns = ("classifier, texts", "right", "sida (fidelity)", "sida:3 (fidelity)", "same as own", "top-1", "top-3")
    notes = (
        "right: with the model's own routers, to the bit wherever experts are. sida, sida:3: with --lossy-routing. "
        "same as own: classes that sida:3 gives as the routers do. top-1, top-3: experts that routers choose and the "
        "network names first, or among the first three.",
    )
    return Table("Right answers and hit rates (tables 3 and 4)", columns, tuple(rows), notes)


def _speeds(record: Record) -> Table:
    rows = []
    for share, found in rows_by_share(record).items():
        for row in found:
            num_slots = _num_slabs(record) if row["way"] == RESIDENT else row["num_slots"]
            text_s = row["text_s"]
            turns = [TURN / sum(text_s[at : at + TURN]) for at in range(0, len(text_s) - TURN + 1, TURN)]
            spread = Spread.of(turns or [row["texts_per_s"]])
            has_baselines = set(BASELINES) <= {one["way"] for one in found}
            rows.append(
                (
                    f"{share}%, {row['way']}",
                    f"{_bytes_with(record, num_slots) / MIB:.0f}",
                    f"{row['texts_per_s']:.1f} ({spread.low:.1f}-{spread.high:.1f})",
                    f"{baseline_ratio(found, row['way']):.2f}" if has_baselines else "",
                    f"{row['latency_s'] * 1e3:.1f}",
                    f"{row['read_bytes_per_text'] / MIB:.1f}",
                    f"{row['stall_s_per_text'] * 1e3:.1f}",
                )
            )
    title = (
        f"{record['model']}, {record['data']}: {len(record['rows'][0]['text_s'])} texts one by one within shares of "
        f"the experts, {threads_text(record)} (figures 9, 10 and 11)"
    )
    columns = ("experts in memory", "weights MiB", "texts/s", "x baselines", "ms a text", "MiB read", "ms waited")
    notes = (
        "The same probabilities to the bit in all rows but the lossy one. x baselines: over the mean of layer by "
        "layer, layers ahead and on demand. In brackets: the slowest and the fastest ten texts in a row.",
    )
    return Table(title, columns, tuple(rows), notes)
