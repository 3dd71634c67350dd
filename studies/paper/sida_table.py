"""SiDA's published results on SST-2 beside kept records of `python -m studies.sida`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moeflow.bench.records import Record
from moeflow.bench.tables import Table

DATA: Final = "sst2"
PREDICTED: Final = "predicted, lossy"  # the published way: the network chooses
WITHOUT: Final = "on demand"
BASELINES: Final = ("layer by layer", "layers ahead", WITHOUT)  # in place of Standard, DeepSpeed and Tutel


@dataclass(frozen=True, slots=True)
class Published:
    """A result by the number of experts in a layer, as the paper writes it."""

    name: str
    figures: Mapping[int, str] = field(default_factory=dict)


SHARE: Final = Published("table 2: experts' share of memory", {8: "78%", 64: "96%", 128: "98%", 256: "99%"})
IDLE: Final = Published("figure 4: experts that a text leaves idle", {128: "over 60%", 256: "over 80%"})
SPARED: Final = Published("figure 8: memory reduction", {128: "over 60%", 256: "over 80%"})
CHOOSING: Final = Published("figure 3: time for choosing experts", {256: "up to 74%"})
SPEED: Final = Published("figure 9: throughput over the mean of three baselines", {128: "2.60", 256: "3.93"})
LATENCY: Final = Published("figure 10: latency over their mean", {128: "25%", 256: "25%"})
GAIN: Final = Published("throughput over loading on demand alone")
BUDGETS: Final = Published("figure 11: budgets at which it is fastest", {128: "all", 256: "all"})
FIDELITY: Final = Published("table 3: fidelity", {8: "98.3%", 128: "93.0%"})
HITS: Final = Published("table 4: top-3 hit rate", {8: "99.0%", 128: "98.8%"})


def sida_table(records: Sequence[Record]) -> Table:
    """Return published results, and those of the newest record for each number of experts."""
    newest = {record["num_experts"]: record for record in records if record["data"] == DATA}
    found = [it for number, record in sorted(newest.items()) for it in _results(number, record)]
    rows = [
        (f"{published.name}, {number} experts", published.figures.get(number, ""), ours)
        for published, number, ours in sorted(found, key=lambda it: ORDER.index(it[0]))
    ]
    made = "; ".join(f"{number} experts {record['time'][:10]}" for number, record in sorted(newest.items()))
    notes = (
        f"Recorded by `python -m studies.sida`: {made}. Ranges are over shares of experts in memory.",
        "Published are Switch Transformers of 12 layers on an A100; ours are classifiers of two layers on a CPU.",
    )
    return Table("SiDA on SST-2, recorded here", ("result", "published", "ours"), tuple(rows), notes)


ORDER: Final = (SHARE, IDLE, SPARED, CHOOSING, SPEED, LATENCY, GAIN, BUDGETS, FIDELITY, HITS)


def _results(number: int, record: Record) -> Iterator[tuple[Published, int, str]]:
    usage, num_slabs = record["usage"], record["num_layers"] * record["num_experts"]
    expert_bytes = num_slabs * record["slab_bytes"]
    share = expert_bytes / (expert_bytes + record["dense_bytes"])
    idle = 1 - statistics.fmean(usage["used_experts"]) / num_slabs
    resident = next(row["texts_per_s"] for row in record["rows"] if row["way"] == "all resident")
    yield SHARE, number, f"{share:.0%}"
    yield IDLE, number, f"{idle:.0%}"
    yield SPARED, number, f"{idle * share:.0%}"
    yield CHOOSING, number, f"{usage['routing_s'] / len(usage['num_tokens']) * resident:.0%}"
    if usage["hit_rates"] is None:
        return
    budgets = [found for found in _by_share(record) if PREDICTED in found and set(BASELINES) <= set(found)]
    rates = [{way: row["texts_per_s"] for way, row in found.items()} for found in budgets]
    yield SPEED, number, _span([it[PREDICTED] / statistics.fmean(it[way] for way in BASELINES) for it in rates])
    times = [{way: row["latency_s"] for way, row in found.items()} for found in budgets]
    shares = [it[PREDICTED] / statistics.fmean(it[way] for way in BASELINES) for it in times]
    yield LATENCY, number, f"{min(shares):.0%} to {max(shares):.0%}"
    yield GAIN, number, _span([it[PREDICTED] / it[WITHOUT] for it in rates])
    fastest = sum(it[PREDICTED] >= max(rate for way, rate in it.items() if way != "all resident") for it in rates)
    yield BUDGETS, number, f"{fastest} of {len(rates)}"
    own = record["answers"]["own"]["right"]
    fidelities = [it["right"] / own for name, it in record["answers"].items() if name != "own" and own]
    yield FIDELITY, number, f"{min(fidelities):.1%} to {max(fidelities):.1%}"
    yield HITS, number, f"{usage['hit_rates']['3']:.1%}"


def _by_share(record: Record) -> list[dict[str, dict[str, Any]]]:
    """Return the rows of each budget by way."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault(row["share"], {})[row["way"]] = row
    return list(found.values())


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
