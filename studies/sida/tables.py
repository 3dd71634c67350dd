"""The study's record as tables: the paper's table and figure of each is named in its title."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from moeflow.bench.metrics import Spread
from moeflow.bench.records import Record
from moeflow.bench.tables import Table, threads_text
from moeflow.core.units import MIB
from studies.sida.arms import LAYER_BY_LAYER, LAYERS_AHEAD, LOSSY, ON_DEMAND, PREDICTED, RESIDENT, TURN

WHOLE_LAYERS: Final = (LAYER_BY_LAYER, LAYERS_AHEAD)
_LEAST_GAIN: Final = 0.02  # of right answers, through right experts: below, the share that is kept is noise


def sida_tables(records: Sequence[Record]) -> list[Table]:
    """Return all tables: what prediction brings, models and texts, right answers, and each one's speeds."""
    predicted = [record for record in records if record["usage"]["hit_rates"] is not None]
    of_predicted = [_gains(predicted), _answers(predicted)] if predicted else []
    return [*of_predicted[:1], _models(records), *of_predicted[1:], *map(_speeds, records)]


def total_bytes(record: Record) -> int:
    """Return what all weights take."""
    return _bytes_with(record, _num_slabs(record))


def idle_shares(record: Record) -> list[float]:
    """Return the share of experts that each text leaves idle (figure 4)."""
    return [1 - used / _num_slabs(record) for used in record["usage"]["used_experts"]]


def over_on_demand(rows: Sequence[dict[str, Any]], way: str) -> float:
    """Return the throughput of a way over on-demand loading with its best policy, within one share of experts."""
    rates = _rates(rows)
    return rates[way] / rates[best_on_demand(rows)]


def over_whole_layers(rows: Sequence[dict[str, Any]], way: str) -> float:
    """Return the same over the mean of the paper's baselines, which stream whole layers."""
    rates = _rates(rows)
    return rates[way] / statistics.fmean(rates[name] for name in WHOLE_LAYERS)


def best_on_demand(rows: Sequence[dict[str, Any]]) -> str:
    """Return the fastest way without a prediction that reads chosen experts alone."""
    rates = _rates(rows)
    return max((name for name in rates if name.startswith(ON_DEMAND)), key=rates.__getitem__)


def _rates(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {row["way"]: float(row["texts_per_s"]) for row in rows}


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


def _gains(records: Sequence[Record]) -> Table:
    rows = [
        (
            f"{record['model']}, {record['data']}: {share}%",
            best_on_demand(found).removeprefix(f"{ON_DEMAND}, "),
            *(
                f"{ratio(found, way):.2f}"
                for ratio in (over_on_demand, over_whole_layers)
                for way in (PREDICTED, LOSSY)
            ),
            f"{over_whole_layers(found, best_on_demand(found)):.2f}",
        )
        for record in records
        for share, found in rows_by_share(record).items()
    ]
    columns = (
        "classifier, texts: experts in memory",
        "best policy",
        "predicted / on demand",
        "lossy / on demand",
        "predicted / layers",
        "lossy / layers",
        "on demand / layers",
    )
    notes = (
        "Ratios of throughput. on demand: experts are fetched when a router chooses them, with the best measured "
        "policy. layers: the mean of the two ways that stream whole layers, as the paper's baselines do. The first "
        "two columns of ratios are the gain from prediction. The last shows how much of the paper's gain needs none.",
    )
    return Table("Gain from prediction", columns, tuple(rows), notes)


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
    for record in records:
        answers, hits = record["answers"], record["usage"]["hit_rates"]
        own, permuted = answers["own"]["right"], answers.get("permuted")
        lossy = [it for name, it in answers.items() if name not in ("own", "permuted")]
        figures = [f"{it['right']:.1%}" + (f" ({it['right'] / own:.1%})" if own else "") for it in lossy]
        rows.append(
            (
                f"{record['model']}, {record['data']}",
                f"{own:.1%}",
                f"{permuted['right']:.1%}" if permuted else "",
                *figures,
                _kept(own, permuted["right"], lossy[-1]["right"]) if permuted else "",
                f"{lossy[-1]['same']:.1%}",
                f"{answers['own']['f1']:.2f}, {lossy[-1]['f1']:.2f}" if permuted else "",
                f"{hits['1']:.1%}",
                f"{hits['3']:.1%}",
            )
        )
    columns = (
        "classifier, texts",
        "right",
        "permuted",
        "sida (fidelity)",
        "sida:3 (fidelity)",
        "kept",
        "same as own",
        "F1",
        "top-1",
        "top-3",
    )
    notes = (
        "right: accuracy with the model's own routers. permuted: the mean of three random permutations of each layer's "
        "experts. sida and sida:3 use --lossy-routing. kept: the gain of sida:3 over permuted experts, divided by "
        "the gain of the routers. Fidelity means little where right and permuted "
        "are close. same as own: classes that sida:3 gives as the routers do. F1: of the last class, by the "
        "routers and sida:3. top-1, top-3: experts that routers choose and the network names first, or among the first "
        "three.",
    )
    return Table("Right answers and hit rates (tables 3 and 4)", columns, tuple(rows), notes)


def _kept(own: float, permuted: float, lossy: float) -> str:
    """Return the share of the experts' gain that is kept; nothing if there is none to keep."""
    gain = own - permuted
    return f"{(lossy - permuted) / gain:.0%}" if gain > _LEAST_GAIN else "no gain"


def _speeds(record: Record) -> Table:
    rows = []
    for share, found in rows_by_share(record).items():
        for row in found:
            num_slots = _num_slabs(record) if row["way"] == RESIDENT else row["num_slots"]
            text_s = row["text_s"]
            turns = [TURN / sum(text_s[at : at + TURN]) for at in range(0, len(text_s) - TURN + 1, TURN)]
            spread = Spread.of(turns or [row["texts_per_s"]])
            rows.append(
                (
                    f"{share}%, {row['way']}",
                    f"{_bytes_with(record, num_slots) / MIB:.0f}",
                    f"{row['texts_per_s']:.1f} ({spread.low:.1f}-{spread.high:.1f})",
                    f"{over_on_demand(found, row['way']):.2f}",
                    f"{over_whole_layers(found, row['way']):.2f}",
                    f"{row['latency_s'] * 1e3:.1f}",
                    f"{row['read_bytes_per_text'] / MIB:.1f}",
                    f"{row['stall_s_per_text'] * 1e3:.1f}",
                )
            )
    title = (
        f"{record['model']}, {record['data']}: {len(record['rows'][0]['text_s'])} texts one by one within shares of "
        f"the experts, {threads_text(record)} (figures 9, 10 and 11)"
    )
    columns = (
        "experts in memory",
        "weights MiB",
        "texts/s",
        "x on demand",
        "x layers",
        "ms a text",
        "MiB read",
        "ms waited",
    )
    notes = (
        "The same probabilities to the bit in all rows but the lossy one. x on demand: over its best policy. x "
        "layers: over the mean of layer by layer and layers ahead. In brackets: the slowest and the fastest ten "
        "texts in a row.",
    )
    return Table(title, columns, tuple(rows), notes)
