"""Writes docs/studies/benchmarks.md and its pictures from docs/studies/results/*.jsonl. Measures nothing.

    python -m studies.report [RESULTS_FOLDER [PAGE_FOLDER]]

`page.md` is the text above the results. `summary.py` writes the table of all claims, and the few of them in the README
two folders above the page. Of records that say the same of the same machine, the newest count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from moeflow.bench.plots import plot_latencies
from moeflow.bench.records import Record, is_dirty, read
from moeflow.bench.tables import (
    Table,
    batch_tables,
    engine_table,
    quality_table,
    serve_tables,
    threads_text,
)
from moeflow.core.errors import ConfigError
from studies.agent_tools import table as tools_table
from studies.answer_forms import table as forms_table
from studies.asynchronous.__main__ import describe as describe_case
from studies.asynchronous.__main__ import table as asynchronous_table
from studies.attention_places import table as places_table
from studies.attention_places_plot import plot_places
from studies.engine_deaths import aborts_table, kills_table
from studies.expert_cache_overhead import table as cache_table
from studies.families_table import families_table, is_family, versus_table
from studies.front_cost_table import table as front_table
from studies.fused_experts import table as experts_table
from studies.gguf_answers_table import table as gguf_table
from studies.harness.command import run_study
from studies.harness.needs import ROOT
from studies.memory_budget import table as memory_table
from studies.offload.device_table import device_groups, device_table
from studies.offload.tables import offload_table
from studies.page_cost import table as page_cost_table
from studies.page_load_table import table as load_table
from studies.page_streaming_table import table as streaming_table
from studies.paper.experiments import experiments_tables, status_counts
from studies.paper.tables import tables as paper_tables
from studies.paper.thesis_tables import measured_tables, simulated_tables
from studies.parallel.paper_tables import paper_tables as sliced_tables
from studies.parallel.paper_tables import subject
from studies.parallel.plots import plot_parallel
from studies.parallel.tables import parallel_tables, title
from studies.peers.drafting_table import drafting_table
from studies.peers.environments import NATIVE
from studies.peers.scores_table import scores_table
from studies.peers.starts_table import starts_table
from studies.peers.tables import pair_table, summary_table
from studies.pipelines import table as pipelines_table
from studies.plan_accuracy import table as accuracy_table
from studies.policy_grid import table as grid_table
from studies.rank_schedules import table as rank_schedules_table
from studies.report.old_records import readable
from studies.report.plots import plot_throughput
from studies.report.summary import README_BEGIN, README_END, claims, readme_table, summary
from studies.server_under_grammars import table as grammars_table
from studies.server_under_long_prompts import table as long_prompts_table
from studies.sida.limits import limits_table
from studies.sida.plots import plot_sida
from studies.sida.tables import sida_tables
from studies.speculation.plots import plot_speculation
from studies.speculation.tables import speculation_tables
from studies.trace_overhead import table as trace_table
from studies.two_machines import table as two_machines_table

STUDIES = ROOT / "docs" / "studies"
NOTHING = """
## Results

There are no records in `docs/studies/results` yet.
"""


def write_page(results: Path, docs: Path) -> None:
    """Write the page."""
    records = read(sorted(results.glob("*.jsonl")))
    intro, explained = Path(__file__).with_name("page.md").read_text(encoding="utf-8").split("<!-- summary -->\n")
    machines = group(records, machine_name)
    found_claims = {machine: claims(found) for machine, found in machines.items()}
    # First the machine that proves most of what the README shows; its figures stand there.
    by_headlines = sorted(found_claims, key=lambda it: -sum(claim.is_in_readme for claim in found_claims[it]))
    machines = {machine: machines[machine] for machine in by_headlines}
    found_claims = {machine: found_claims[machine] for machine in by_headlines}
    tables = [f"{summary(machine, made)}\n" for machine, made in found_claims.items() if made]
    parts = [intro, *tables, explained, papers_section()]
    for machine, found in machines.items():
        parts.append(f"\n## {machine}\n")
        for kind, (heading, write) in SECTIONS.items():
            chosen = [record for record in found if record["kind"] == kind]
            if chosen:
                with readable(chosen):
                    parts.append(f"\n### {heading}\n\n{write(chosen, docs)}")
    if not records:
        parts.append(NOTHING)
    (docs / "benchmarks.md").write_text("".join(parts), encoding="utf-8")
    readme = docs.parents[1] / "README.md"
    if records and readme.exists():
        write_figures(readme, readme_table(*next(iter(found_claims.items()))))


def papers_section() -> str:
    """Write the list of the four papers' tables and figures."""
    tables = "\n".join(table.to_markdown() for table in experiments_tables())
    return f"\n## The four papers' tables and figures\n\nOf all: {status_counts()}.\n\n{tables}"


def write_figures(readme: Path, figures: str) -> None:
    """Put figures between their marks in the README."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(README_BEGIN)
    _, _, after = rest.partition(README_END)
    if not after:
        raise ConfigError(f"{readme} has no lines {README_BEGIN} and {README_END}; put them where figures belong")
    readme.write_text(f"{before}{README_BEGIN}\n\n{figures}\n{README_END}{after}", encoding="utf-8")


def group(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Split records by a key, in order of first appearance."""
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def machine_name(record: Record) -> str:
    """Return the heading of a machine's results."""
    machine = record["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"


def newest(records: Sequence[Record]) -> Record:
    """Return the record that was made last."""
    return max(records, key=lambda record: record["time"])


def newest_runs(records: Sequence[Record]) -> list[Record]:
    """Return, of each system, the records that its newest one's command made at its commit."""
    chosen: list[Record] = []
    for found in group(records, lambda r: r["system"]).values():
        last = newest(found)
        chosen += [r for r in found if (r["command"], r["commit"]) == (last["command"], last["commit"])]
    return chosen


def newest_rows(records: Sequence[Record]) -> list[Record]:
    """Return, oldest first, the records of one pair with those rows that no later record has."""
    chosen: list[Record] = []
    names: set[str] = set()
    for record in sorted(records, key=lambda record: record["time"], reverse=True):
        rows = [row for row in record["rows"] if row["name"] not in names]
        names |= {row["name"] for row in rows}
        if rows:
            chosen.append({**record, "rows": rows})
    return chosen[::-1]


def traffic(record: Record) -> tuple[Hashable, ...]:
    """Return what must be the same for records of serving to be compared: what was served, and the traffic's shape."""
    shape = {name: value for name, value in record["workload"].items() if name not in ("rate", "seed", "vocab_size")}
    return record["model"], record["weight_format"], record["device"], *shape.items()


def origins(records: Iterable[Record]) -> str:
    """Write where tables come from, each command once."""
    return "".join(dict.fromkeys(map(origin, records)))


def origin(record: Record) -> str:
    """Write where a table comes from."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    with_threads = f", {threads_text(record)}" if record["machine"]["threads"] else ""
    day = record["time"][:10]
    command = re.sub(r"(?<=\s)/\S*/(?=\S)", "", record["command"])  # where a file lay is that machine's business
    commit = (record["commit"] or "unknown").rstrip("+")
    mark = " **with changes that were not committed: to be measured again**" if is_dirty(record) else ""
    return f"\n`{command}`  \n{day}, commit {commit}{mark}{with_threads}, {versions}.\n\n"


def newest_of_each(records: Iterable[Record], key: Callable[[Record], Any]) -> list[Record]:
    """Return the newest record of each key."""
    return [newest(found) for found in group(records, key).values()]


def text_of(tables: Iterable[Table], records: Iterable[Record]) -> str:
    """Write tables, and the commands of their records."""
    return "\n".join(table.to_markdown() for table in tables) + origins(records)


def write_serve(records: list[Record], docs: Path) -> str:
    """Write each model and format's newest sweep, with its pictures."""
    text = ""
    for number, (key, found) in enumerate(group(records, traffic).items(), 1):
        run = newest_runs(found)
        text += text_of(serve_tables(run), run)
        slug = re.sub(r"[^a-z0-9]+", "-", f"{number} {key[0]} {key[1] or ''}".lower()).strip("-")
        text += pictures(run, docs, slug)
    return text


def pictures(run: list[Record], docs: Path, slug: str) -> str:
    """Draw throughput over the arrival rate, and latency over length at each rate."""
    file = docs / "images" / f"serve-{slug}-throughput.png"
    plot_throughput({name: found for name, found in group(run, lambda r: r["system"]).items()}, file)
    text = f"![Throughput over the arrival rate](images/{file.name})\n\n"
    for rate, at_rate in sorted(group(run, lambda r: r["rate"]).items()):
        file = docs / "images" / f"serve-{slug}-{rate:g}.png"
        systems = group(at_rate, lambda r: r["system"])
        plot_latencies({name: [r["requests"] for r in found] for name, found in systems.items()}, rate, file)
        text += f"![Latency over length at {rate:g} requests/s](images/{file.name})\n\n"
    return text


def write_parallel(records: list[Record], docs: Path) -> str:
    """Write the newest grid of each kind of layer, with its picture."""
    text = ""
    for number, found in enumerate(group(records, title).values(), 1):
        last = newest(found)
        grid = [r for r in found if (r["command"], r["commit"]) == (last["command"], last["commit"])]
        file = docs / "images" / f"parallel-{number}.png"
        plot_parallel(grid, file)
        text += text_of(parallel_tables(grid), grid)
        text += f"![{title(last)}](images/{file.name})\n\n"
    return text


def write_sliced(records: list[Record], _docs: Path) -> str:
    """Write the newest record of each setting, by size and number of ranks."""
    text = ""
    for found in group(records, subject).values():
        settings = newest_of_each(found, lambda r: str(r["point"]))
        text += text_of(sliced_tables(settings), settings)
    return text


def write_batch(records: list[Record], _docs: Path) -> str:
    """Write the newest runs of each job, those of one engine in one table, and interactive requests beside jobs."""
    engines = group(records, lambda r: (r["model"], r["weight_format"], r["measured"], job_cache(r)))
    text = ""
    for found in engines.values():
        jobs = group(found, lambda r: (r["workload"]["name"], r["workload"]["num_new"], r.get("rate"), r.get("system")))
        chosen = [
            record for same in jobs.values() for record in same if but_for_seed(record) == but_for_seed(newest(same))
        ]
        text += text_of(batch_tables(chosen), chosen)
    return text


def job_cache(record: Record) -> int | None:
    """Return the KV cache's tokens, which decide what padding costs; beside interactive requests there are enough."""
    return record["kv_capacity_tokens"] if record["measured"] == "job" else None


def but_for_seed(record: Record) -> str:
    """Return the command, of which runs with several seeds are repetitions."""
    return re.sub(r" --seed \d+", "", record["command"])


def write_peers(records: list[Record], _docs: Path) -> str:
    """Write ours compared with the best peer, then each pair. Of a peer's builds, the one that was measured last
    counts.
    """
    groups = group(records, lambda r: (r["format"], r["ours"], r["peer"].removesuffix(", AVX2")))
    chosen = [record for found in groups.values() for record in newest_rows(found)]
    by_isa = group(chosen, lambda r: r.get("isa", NATIVE)).values()
    return text_of([*map(summary_table, by_isa), *map(pair_table, chosen)], chosen)


def write_each(table: Callable[[Sequence[Record]], Table], key: Callable[[Record], Any]) -> Callable[..., str]:
    """Return how to write one table of the newest record of each key."""

    def write(records: list[Record], _docs: Path) -> str:
        chosen = newest_of_each(records, key)
        return text_of([table(chosen)], chosen)

    return write


def write_speculation(records: list[Record], docs: Path) -> str:
    """Write the newest run of each model and choice of speculators, with its picture."""
    text = ""
    groups = group(records, lambda r: (r["model"], r["weight_format"], tuple(r["speculators"]), r["temperature"]))
    for number, found in enumerate(groups.values(), 1):
        record = newest(found)
        file = docs / "images" / f"speculation-{number}.png"
        plot_speculation(record, file)
        text += text_of(speculation_tables(record), [record])
        text += f"![Right drafts by tokens ahead, and speed-ups](images/{file.name})\n\n"
    return text


def write_sida(records: list[Record], docs: Path) -> str:
    """Write the newest run of each classifier on each of its texts, with its picture."""
    chosen = newest_of_each(records, lambda r: (r["model"], r["data"], r["lossy"]))
    text = text_of(sida_tables(chosen), chosen)
    for record in chosen:
        file = docs / "images" / f"sida-{record['model']}.png"
        plot_sida(record, file)
        text += f"![Idle experts, throughput and latency of {record['model']}](images/{file.name})\n\n"
    return text


def write_limits(records: list[Record], _docs: Path) -> str:
    """Write the newest run of each classifier on each of its texts."""
    chosen = newest_of_each(records, lambda r: (r["model"], r["data"]))
    return text_of([limits_table(record) for record in chosen], chosen)


def write_pipelines(records: list[Record], _docs: Path) -> str:
    """Write a table for each model and device, with each pipeline's newest run in each size of micro-batches."""
    text = ""
    for found in group(records, lambda r: (r["model"], r["weights"], r["device"], r.get("device_share"))).values():
        chosen = newest_of_each(found, lambda r: (r["pipeline"], r["micro_batch"]))
        text += text_of([pipelines_table(chosen)], chosen)
    return text


def write_places(records: list[Record], docs: Path) -> str:
    """Write a table and a picture for each model and device."""
    text = ""
    for number, found in enumerate(group(records, lambda r: (r["shape"], r["device"])).values(), 1):
        chosen = newest_of_each(found, lambda r: (r["micro_batch"], r["context"]))
        file = docs / "images" / f"attention-places-{number}.png"
        plot_places(chosen, file)
        text += text_of([places_table(chosen)], chosen)
        text += f"![Times of attending on the host, and of fetching](images/{file.name})\n\n"
    return text


def write_larger_than_gpu(records: list[Record], _docs: Path) -> str:
    """Write a table for each model and GPU."""
    return "".join(text_of([device_table(found)], found) for found in device_groups(records))


def write_newest(table: Callable[[Record], Table], key: Callable[[Record], Any]) -> Callable[[list[Record], Path], str]:
    """Return how to write a table of the newest record of each kind that the key tells apart."""

    def write(records: list[Record], _docs: Path) -> str:
        return "".join(text_of([table(record)], [record]) for record in newest_of_each(records, key))

    return write


def write_versus(records: list[Record], docs: Path) -> str:
    """Write one table of all families' random models, and one of each other model."""
    families = newest_of_each(filter(is_family, records), lambda r: r["model"])
    text = families_table(families).to_markdown() + family_origins(families) if families else ""
    others = [record for record in records if not is_family(record)]
    return text + write_newest(versus_table, lambda r: (r["model"], r["weight_format"]))(others, docs)


def family_origins(records: Sequence[Record]) -> str:
    """Write where the rows come from: each command once, and where there are several, which families' rows are its."""
    found = group(records, lambda r: origin(r).replace(f" {r['model']} ", " FAMILY "))
    return "".join(
        f"{text.rstrip()} {', '.join(r['model'] for r in rows)}.\n\n" if len(found) > 1 else text
        for text, rows in found.items()
    )


def write_last(tables: Callable[[Record], Sequence[Table]]) -> Callable[[list[Record], Path], str]:
    """Return how to write the tables of the newest record."""

    def write(records: list[Record], _docs: Path) -> str:
        return text_of(tables(newest(records)), [newest(records)])

    return write


SECTIONS: dict[str, tuple[str, Callable[[list[Record], Path], str]]] = {
    "engine": ("Engine", write_newest(engine_table, lambda r: (r["model"]["name"], r["weight_format"], r["device"]))),
    "peers": ("Other engines", write_peers),
    "peer_starts": (
        "Other engines: from start to first token",
        write_each(starts_table, lambda r: (r["model"], r["format"])),
    ),
    "peer_scores": (
        "Other engines: perplexity of the same file",
        write_each(scores_table, lambda r: (r["model"], r["format"], r["isa"])),
    ),
    "speculation": ("Drafted tokens", write_speculation),
    "speculation_peers": (
        "Drafted tokens beside llama.cpp",
        write_newest(drafting_table, lambda r: (r["target"], r["draft"])),
    ),
    "offload": (
        "Models larger than memory",
        write_newest(offload_table, lambda r: (r["workload"], r["prompt_len"], r["new_tokens"], r["format"])),
    ),
    "attention_places": ("Attention on the host, or keys and values on the device", write_places),
    "offload_device": ("Models larger than a GPU, beside llama.cpp", write_larger_than_gpu),
    "two_machines": (
        "Uses of a second machine",
        write_newest(two_machines_table, lambda r: (r["shape"], r["memory"], r["disk_mb_per_s"], r["link"])),
    ),
    "asynchronous": (
        "Experts on devices, with barriers and without",
        write_newest(asynchronous_table, lambda r: tuple(describe_case(row["case"]) for row in r["cases"])),
    ),
    "rank_schedules": (
        "Layouts and schedules of ranks",
        write_newest(rank_schedules_table, lambda r: (r["link"], r["bias"], r["scale"], tuple(r["cases"][0]["arms"]))),
    ),
    "sida": ("Classifiers within shares of their experts", write_sida),
    "sida_limits": ("What limits predictions of experts", write_limits),
    "pipelines": ("Models larger than a device", write_pipelines),
    "paper": ("MoE-Lightning's figures, predicted", write_last(paper_tables)),
    "expertflow": ("ExpertFlow's figures, simulated", write_last(simulated_tables)),
    "expertflow_measured": ("ExpertFlow's figures, measured on a small model", write_last(measured_tables)),
    "fused_experts": ("Expert layer", write_newest(experts_table, lambda r: r["format"])),
    "engine_vs_transformers": ("transformers' generate", write_versus),
    "serve": ("Serving", write_serve),
    "front_cost": ("HTTP processes", write_newest(front_table, lambda r: r["fronts"])),
    "server_under_long_prompts": (
        "Serving beside long prompts",
        write_newest(long_prompts_table, lambda r: r["model"]),
    ),
    "server_under_grammars": (
        "Serving beside slow grammars",
        write_newest(grammars_table, lambda r: (r["model"], r["attackers"])),
    ),
    "agent_tools": ("An agent's tools", write_newest(tools_table, lambda r: (r["model"], r["num_tools"]))),
    "engine_kills": ("Engines that are killed", write_newest(kills_table, lambda r: r["num_streams"])),
    "engine_aborts": ("Clients that hang up", write_newest(aborts_table, lambda r: r["num_aborts"])),
    "batch": ("Batch jobs", write_batch),
    "parallel": ("Experts over ranks", write_parallel),
    "sliced_models": ("Sliced experts in whole models", write_sliced),
    "quality": (
        "Quality",
        write_each(
            quality_table,
            lambda r: (r["model"], r["weight_format"], r["kv_dtype"], r["text"], r.get("has_importance", False)),
        ),
    ),
    "gguf_answers": ("Answers of GGUF files", write_each(gguf_table, lambda r: (r["model"], r["format"]))),
    "plan_accuracy": ("Plans: predicted and measured", write_newest(accuracy_table, lambda r: r["model"])),
    "policy_grid": (
        "Plans against a grid",
        write_newest(grid_table, lambda r: (r["model"], r["weight_format"], r["memory_bytes"])),
    ),
    "memory_budget": (
        "The memory limit",
        write_newest(memory_table, lambda r: (r["model"], r["verb"], r["is_enforced"])),
    ),
    "expert_cache_overhead": (
        "What an expert cache costs",
        write_newest(cache_table, lambda r: (r["model"], r["weight_format"], r["policy"], r["predictor"])),
    ),
    "answer_forms": (
        "What a JSON schema costs",
        write_newest(forms_table, lambda r: (r["model"], r["weight_format"])),
    ),
    "page_streaming": (
        "The page while an answer streams",
        write_newest(streaming_table, lambda r: (r["num_tokens"], r["rate"], r["is_phone"])),
    ),
    "page_cost": ("The cost of an open page", write_newest(page_cost_table, lambda r: r["tokens"])),
    "page_load": ("The page's first load", write_newest(load_table, lambda r: r["lighthouse"])),
    "trace_overhead": ("What a trace costs", write_newest(trace_table, lambda r: (r["model"], r["memory_bytes"]))),
}


@click.command(help=__doc__)
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path), default=STUDIES / "results")
@click.argument("page", type=click.Path(exists=True, file_okay=False, path_type=Path), default=STUDIES)
def main(results: Path, page: Path) -> None:
    """Write the page, from the folder of records."""
    write_page(results, page)


if __name__ == "__main__":
    run_study(main)
