"""Records as tables, the same for the terminal and for the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moeflow.bench.metrics import Spread, percentile
from moeflow.bench.records import Record
from moeflow.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Table:
    """Text in rows; the first column is what a row is about, the others are figures, or words if `words` has it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    words: tuple[int, ...] = ()  # numbers of the columns that hold words: begun at the left, wrapped where need be

    def to_markdown(self) -> str:
        """Write it as Markdown: title in bold, table, notes."""
        lines = [f"**{self.title}**", ""]
        sides = ["---" if number == 0 or number in self.words else "---:" for number in range(len(self.columns))]
        lines += [_markdown_row(self.columns), _markdown_row(sides)]
        lines += [_markdown_row(row) for row in self.rows]
        lines += [line for note in self.notes for line in ("", note)]
        return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def threads_text(record: Record) -> str:
    """Write how many threads computed."""
    threads = record["machine"]["threads"]
    return f"{threads} thread{'' if threads == 1 else 's'}"


def spread_text(values: Sequence[float], digits: int = 1) -> str:
    """Write median and range: "12.3 (11.9-12.8)"; a single value alone."""
    spread = Spread.of(values)
    if len(values) == 1:
        return f"{spread.median:.{digits}f}"
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def quality_table(records: Sequence[Record]) -> Table:
    """Return `bench quality` records as a table, one row each."""
    rows = [
        (
            _formats_text(record),
            f"{record['reference_perplexity']:.3f} ({record['reference_format']})",
            f"{record['perplexity']:.3f}",
            f"{record['change_percent']:+.2f}% ± {record['change_error_percent']:.2f}",
            f"{record['same_likeliest_share']:.1%}",
            f"{record['same_greedy_share']:.1%}",
            f"{record['num_tokens']:,}",
            format_bytes(record["weight_bytes"]) if "weight_bytes" in record else "",
        )
        for record in records
    ]
    columns = ("", "own perplexity", "perplexity", "change", "same likeliest", "same greedy", "tokens", "weights")
    return Table("Quality, against the model's own precision", columns, tuple(rows))


def _formats_text(record: Record) -> str:
    """Write the tested formats: the weights' format, and that of K and V where it differs from the reference's."""
    kv = record["kv_dtype"]
    with_kv = f", K and V in {kv}" if kv != record["reference_kv_dtype"] else ""
    with_importance = ", by importance" if record.get("has_importance") else ""
    return f"{record['model']}, {record['weight_format']}{with_importance}{with_kv}"


def serve_tables(records: Sequence[Record]) -> list[Table]:
    """Return `bench serve` records of one model as the thesis' tables 6.1 to 6.3: rates of both kinds, latencies."""
    runs: dict[float, dict[str, list[Record]]] = {}
    for record in records:
        if "latency_avg_s" in record["summary"]:
            runs.setdefault(record["rate"], {}).setdefault(record["system"], []).append(record)
    systems = list(dict.fromkeys(record["system"] for record in records))
    weights = records[0]["weight_format"]
    about = records[0]["model"] + (f", weights in {weights}" if weights else "")
    rate_tables = [
        _rate_table(f"{title}: {about}", key, digits, runs, systems)
        for title, key, digits in (("Requests/s", "requests_per_s", 2), ("Generated tokens/s", "tokens_per_s", 1))
    ]
    failed = sum(record["summary"]["num_failed"] for record in records)
    notes = [f"{failed} requests failed: {_errors(records)}."] if failed else []
    return [*rate_tables, _latency_table(f"Latency in ms: {about}", runs, notes)]


def _rate_table(
    title: str, key: str, digits: int, runs: dict[float, dict[str, list[Record]]], systems: list[str]
) -> Table:
    pairs = [("continuous", "static"), *((name, "continuous") for name in systems if name.startswith("continuous, "))]
    compared = [pair for pair in pairs if set(pair) <= set(systems)]
    rows = []
    for rate, by_system in sorted(runs.items()):
        values = {name: [each["summary"][key] for each in found] for name, found in by_system.items()}
        row = [f"{rate:g}", *(spread_text(values[name], digits) if name in values else "" for name in systems)]
        for one, other in compared:
            row.append(spread_text(_ratios(by_system, key, one, other), 2) if {one, other} <= set(values) else "")
        rows.append(tuple(row))
    columns = ("arrivals/s", *systems, *(f"{one} / {other}" for one, other in compared))
    return Table(title, columns, tuple(rows))


def _ratios(by_system: dict[str, list[Record]], key: str, one: str, other: str) -> list[float]:
    """Return one system over another, of the same traffic each; of the medians if none was the same."""
    theirs = {record["workload"]["seed"]: record["summary"][key] for record in by_system[other]}
    ours = {record["workload"]["seed"]: record["summary"][key] for record in by_system[one]}
    pairs = [ours[seed] / theirs[seed] for seed in ours if seed in theirs]
    return pairs or [statistics.median(ours.values()) / statistics.median(theirs.values())]


def _latency_table(title: str, runs: dict[float, dict[str, list[Record]]], notes: list[str]) -> Table:
    keys = (
        ("average", "latency_avg_s"),
        ("min", "latency_min_s"),
        ("max", "latency_max_s"),
        ("p50", "latency_p50_s"),
        ("p99", "latency_p99_s"),
        ("first token p50", "first_token_p50_s"),
        ("first token p99", "first_token_p99_s"),
        ("per token p50", "per_token_p50_s"),
        ("per token p99", "per_token_p99_s"),
    )
    rows = []
    for rate, by_system in sorted(runs.items()):
        for name, found in by_system.items():
            cells = []
            for _, key in keys:
                values = [1000 * each["summary"][key] for each in found if key in each["summary"]]
                cells.append(f"{statistics.median(values):.0f}" if values else "")
            rows.append((f"{rate:g} arrivals/s, {name}", *cells))
    return Table(title, ("", *(label for label, _ in keys)), tuple(rows), tuple(notes))


def batch_tables(records: Sequence[Record]) -> list[Table]:
    """Return `bench batch` records of one model: jobs padded and not, and interactive requests beside a job."""
    jobs = [record for record in records if record["measured"] == "job"]
    kinds: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record["measured"] == "beside":
            kinds.setdefault((record["workload"]["name"], record["rate"]), []).append(record)
    return [*([_job_table(jobs)] if jobs else []), *map(_beside_table, kinds.values())]


def _job_table(records: Sequence[Record]) -> Table:
    systems = list(dict.fromkeys(record["system"] for record in records))
    kinds: dict[str, list[Record]] = {}
    for record in records:
        job = record["workload"]
        prompts = f"{job['mean_prompt']:.0f} on average, {job['longest_prompt']} at most"
        kinds.setdefault(f"{job['name']}: {job['num_requests']} prompts ({prompts}), {job['num_new']} new", []).append(
            record
        )
    rows = []
    for name, found in kinds.items():
        rates = {
            system: [it["summary"]["tokens_per_s"] for it in found if it["system"] == system] for system in systems
        }
        row = [name, *(spread_text(rates[system]) if rates[system] else "" for system in systems)]
        if len(systems) == 2:
            first, second = (rates[system] for system in systems)
            ratios = [one / other for one, other in zip(first, second, strict=False)]
            row.append(spread_text(ratios, 2) if ratios else "")
        rows.append(tuple(row))
    columns = ("", *systems, *([f"{systems[0]} / {systems[1]}"] if len(systems) == 2 else []))
    about = records[0]
    capacity = about["kv_capacity_tokens"]
    notes = (f"KV cache of {capacity} tokens, {about['max_num_seqs']} requests together at most.",)
    return Table(
        f"Generated tokens/s: {about['model']}, weights in {about['weight_format']}", columns, tuple(rows), notes
    )


def _beside_table(records: Sequence[Record]) -> Table:
    """Combine all repetitions."""
    rows = []
    for label, key, percent, digits in (
        ("per token p50, ms", "per_token_s", 50, 1),
        ("per token p99, ms", "per_token_s", 99, 1),
        ("first token p50, ms", "first_token_s", 50, 0),
        ("first token p99, ms", "first_token_s", 99, 0),
    ):
        alone, beside = (
            percentile([value for record in records for value in record[part][key]], percent) * 1000
            for part in ("interactive_alone", "interactive_beside_job")
        )
        rows.append((label, f"{alone:.{digits}f}", f"{beside:.{digits}f}", f"{beside / alone:.2f}"))
    alone, beside = (
        sum(record[part]["tokens"] for record in records) / sum(record[part]["seconds"] for record in records)
        for part in ("job_alone", "job_beside_interactive")
    )
    rows.append(("job, tokens/s", f"{alone:.1f}", f"{beside:.1f}", f"{beside / alone:.2f}"))
    about = records[0]
    title = f"Interactive requests, {about['rate']:g}/s, beside a job ({about['workload']['name']}): {about['model']}"
    count = sum(len(record["interactive_alone"]["first_token_s"]) for record in records)
    notes = (f"{count} interactive requests. Per token: a request's mean time of a token after its first.",)
    return Table(title, ("", "alone", "together", "ratio"), tuple(rows), notes)


def _errors(records: Sequence[Record]) -> str:
    return "; ".join(dict.fromkeys(error for record in records for error in record["errors"]))


def engine_table(record: Record) -> Table:
    """Return a `bench engine` record as a table."""
    read, flops = record["read_bytes_per_s"], record["fp32_flops_per_s"]
    rows = []
    for case in record["cases"]:
        row = [case["name"], spread_text(case["tokens_per_s"])]
        runs_per_s = statistics.median(case["tokens_per_s"]) / case["num_tokens"]
        if read:
            floor = case["num_tokens"] * statistics.median(read) / case["num_bytes"]
            row += [f"{floor:.1f}", f"{case['num_bytes'] * runs_per_s / statistics.median(read):.0%}"]
            row += [f"{case['num_flops'] * runs_per_s / statistics.median(flops):.0%}"]
        else:
            row += ["", "", ""]
        rows.append(tuple(row))
    columns = ("", "tokens/s", "bandwidth allows", "of bandwidth", "of fp32 peak")
    memory = record["memory"]
    notes = [
        f"Loaded in {record['load_s']:.2f} s. Resident {format_bytes(memory['loaded_bytes'])}"
        + (f", at most {format_bytes(memory['peak_bytes'])}" if memory["peak_bytes"] else "")
        + f"; {format_bytes(memory['before_bytes'])} before the model, weights {format_bytes(record['weight_bytes'])}, "
        f"KV cache {format_bytes(record['kv_cache_bytes'])}."
    ]
    if read:
        notes.append(
            f"This machine reads {spread_text([value / 1e9 for value in read])} GB/s "
            f"and computes {spread_text([value / 1e9 for value in flops], 0)} GFLOP/s in float32 "
            f"with {threads_text(record)}."
        )
    notes += [
        f"Measured again, far from the others: {case['name']}, {spread_text(case['outliers'])} tokens/s."
        for case in record["cases"]
        if case.get("outliers")
    ]
    notes += [f"Not run: {name}: {reason}." for name, reason in record["skipped"].items()]
    if not record["is_complete"]:
        notes.append("Interrupted: not all repetitions were made.")
    title = f"{record['model']['name']}, weights in {record['weight_format']}, {record['device']}: median (min-max)"
    return Table(title, columns, tuple(rows), tuple(notes))
