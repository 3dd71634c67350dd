"""The page of results from records: the newest of each, their origin, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from moeflow.bench.records import is_dirty, read
from moeflow.core.errors import ConfigError
from studies.report.__main__ import write_page as write
from studies.report.summary import NUM_README, claims, readme_table
from tests.bench.examples import (
    accuracy_record,
    beside_record,
    cache_record,
    drafting_record,
    engine_record,
    family_record,
    forms_record,
    grid_record,
    job_record,
    load_record,
    memory_record,
    parallel_record,
    quality_record,
    serve_record,
    speculation_record,
    streaming_record,
    trace_record,
    versus_record,
)
from tests.studies import running

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # draws with matplotlib


def write_page(tmp_path: Path, *records: dict) -> str:
    """Return the page that is made of these records."""
    results, docs = tmp_path / "results", tmp_path / "docs" / "studies"
    results.mkdir(exist_ok=True)
    docs.mkdir(parents=True, exist_ok=True)
    (results / "all.jsonl").write_text("\n".join(map(json.dumps, records)))
    write(results, docs)
    return (docs / "benchmarks.md").read_text()


def test_the_page_holds_the_newest_of_each(tmp_path):
    old = engine_record(time="2025-01-01T00:00:00+00:00", load_s=99.0)
    serving = [serve_record(name, rate=4.0, seed=0, requests_per_s=2.0) for name in ("continuous", "static")]
    earlier = serve_record("static", rate=8.0, seed=0, requests_per_s=2.0) | {
        "time": "2025-01-01T00:00:00+00:00",
        "commit": "0000000",
    }
    page = write_page(tmp_path, engine_record(), old, earlier, *serving, quality_record(), versus_record())
    assert "## Abacus, 2 cores, 24 GiB" in page
    headings = [line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")]
    assert headings == ["Engine", "transformers' generate", "Serving", "Quality"]
    assert "Loaded in 1.50 s" in page
    assert "99.00" not in page
    assert "| 4 | 2.00 | 2.00 | 1.00 |" in page
    assert "| 8 |" not in page
    assert "`moeflow bench all mine --fast`" in page  # the command, without where the file lay
    assert "2026-01-31, commit 1a2b3c4, 2 threads, python 3.11.7, torch 2.13.0." in page
    pictures = {line.split("(")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")}
    assert pictures == {"images/serve-1-mine-float32-throughput.png", "images/serve-1-mine-float32-4.png"}
    assert all((tmp_path / "docs" / "studies" / picture).stat().st_size > 1000 for picture in pictures)


def test_families_share_a_table_and_commands_say_whose_they_are(tmp_path):
    old = family_record("llama", 90.0, 90.0) | {"time": "2025-01-01T00:00:00+00:00"}
    changed = family_record("mixtral", 20.0, 20.0) | {"is_dirty": True}
    page = write_page(tmp_path, old, family_record("llama", 30.0, 20.0), changed, versus_record())
    families = rows_of(page, "Families, random models")
    assert {name: cells[2] for name, cells in families.items()} == {"llama": "3.00", "mixtral": "2.00"}
    sources = page.split("`python -m studies.engine_vs_transformers FAMILY --dtype bfloat16`")[1:]
    assert [source.split("torch 2.13.0. ")[1].split("\n")[0] for source in sources] == ["llama.", "mixtral."]
    assert ["to be measured again" in source.split("torch")[0] for source in sources] == [False, True]
    assert "**mine, float32, tokens/s" in page
    claim = "decode, batch 1, bfloat16, 2 families' random models: tokens/s compared with transformers"
    assert rows_of(page, "In short")[claim][:3] == ["25.0 (20.0-30.0)", "10.0 (10.0-10.0)", "2.50 (2.00-3.00)"]
    assert "[2026-01-31, uncommitted changes](#transformers-generate)" in page


def test_servers_under_the_same_traffic_share_a_table_and_other_traffic_has_its_own(tmp_path):
    served = [serve_record(name, rate=4.0, seed=0, requests_per_s=2.0) for name in ("mine", "theirs")]
    for record, command in zip(served, ("bench --url a", "bench --url b"), strict=True):
        record |= {"model": "servers", "weight_format": None, "device": None, "command": command}
    other = {**served[0], "workload": {"seed": 0, "num_requests": 9}}
    page = write_page(tmp_path, *served, other)
    assert "| arrivals/s | mine | theirs |" in page
    assert "| arrivals/s | mine |\n" in page
    assert page.count("`bench --url b`") == 1
    assert "**Requests/s: servers**" in page


def test_without_records_the_page_says_so(tmp_path):
    page = write_page(tmp_path)
    assert "There are no records" in page
    assert "## How it is measured" in page


def test_a_damaged_record_is_one_line(tmp_path):
    (tmp_path / "all.jsonl").write_text("{")
    done = running.run("studies.report", str(tmp_path), str(tmp_path))
    assert done.exit_code == 2
    assert re.match(r"error: .*all\.jsonl, line 1", done.stderr)


@contextmanager
def suppress_only(kind: type[Exception], complaint: str) -> Iterator[None]:
    """Allow an error with this text."""
    try:
        yield
    except kind as error:
        if not re.match(complaint, str(error)):
            raise


def test_a_record_in_the_form_of_another_version_is_one_line(tmp_path):
    """The error names the record and a remedy, whichever field is missing or of another type."""
    complaint = r"the record of 2024-05-05, kind '.*', cannot be shown: .*: delete its line, or measure again"
    records = [engine_record(), speculation_record(2.0), drafting_record(2.0), accuracy_record(0.1), quality_record()]
    fields = ("kind", "time", "command", "seed", "commit", "is_dirty", "machine", "versions")
    for record in records:
        for field in record.keys() - fields:
            others = {name: value for name, value in record.items() if name != field} | {"time": "2024-05-05"}
            for old in (others, others | {field: 3}):
                with suppress_only(ConfigError, complaint):
                    write_page(tmp_path, old)


def test_a_missing_field_of_drafts_is_named_in_one_line(tmp_path):
    old = speculation_record(2.0) | {"time": "2024-05-05"}
    old["arms"] = [{name: value for name, value in arm.items() if name != "is_chain"} for arm in old["arms"]]
    (tmp_path / "all.jsonl").write_text(json.dumps(old))
    (tmp_path / "images").mkdir()
    done = running.run("studies.report", str(tmp_path), str(tmp_path))
    assert done.exit_code == 2
    assert done.stderr == (
        "error: the record of 2024-05-05, kind 'speculation', cannot be shown: the field 'is_chain' is missing. "
        "Another version wrote it: delete its line, or measure again with its command\n"
    )


def test_jobs_of_one_engine_share_a_table(tmp_path):
    jobs = [job_record(system, num_new) for num_new in (32, 64) for system in ("variable length", "padded")]
    page = write_page(tmp_path, *jobs)
    assert "### Batch jobs" in page
    rows = [line for line in page.splitlines() if line.startswith("| mtbench")]
    assert [row.split("|")[-2].strip() for row in rows] == ["3.00", "3.00"]


def test_interactive_requests_of_all_seeds_are_taken_together(tmp_path):
    old = beside_record(9, command="moeflow bench batch --interactive-rate 0.25 -n 9", time="2025-01-01T00:00:00+00:00")
    page = write_page(tmp_path, old, beside_record(0), beside_record(1))
    assert "8 interactive requests." in page
    assert "| per token p50, ms | 10.0 | 20.0 | 2.00 |" in page
    assert "| per token p99, ms | 30.0 | 60.0 | 2.00 |" in page
    assert "| job, tokens/s | 200.0 | 126.7 | 0.63 |" in page


def test_the_newest_grid_of_ranks_is_shown_with_its_picture(tmp_path):
    grid = [parallel_record(router_skew=skew) for skew in (0.0, 0.9)]
    old = parallel_record(router_skew=0.5, command="python -m studies.parallel", time="2025-01-01T00:00:00+00:00")
    page = write_page(tmp_path, old, *grid)
    assert "### Experts over ranks" in page
    rows = rows_of(page, "Speed-up over capacity-dropless")
    assert list(rows) == ["8 experts, skew 0, 1,024 tokens", "8 experts, skew 0.9, 1,024 tokens"]
    assert "(images/parallel-1.png)" in page
    assert (tmp_path / "docs" / "studies" / "images" / "parallel-1.png").stat().st_size > 5000


def rows_of(page: str, title: str) -> dict[str, list[str]]:
    """Return the cells of the table under a title, by first cell."""
    lines = page.split(f"**{title}")[1].split("\n\n")[1].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in rows}


def test_claims_open_the_page_with_figures_of_their_records(tmp_path):
    serving = [
        serve_record(name, rate=4.0, seed=seed, requests_per_s=rate)
        for seed, rates in enumerate(((3.0, 2.0), (3.0, 1.0)))
        for name, rate in zip(("continuous", "static"), rates, strict=True)
    ]
    records = [
        engine_record(weight_format="bfloat16", cases=[{**engine_record()["cases"][0], "name": "decode, batch 1"}]),
        *serving,
        quality_record(),
        *(job_record(system, 32) for system in ("variable length", "padded")),
        beside_record(0),
        accuracy_record(0.1, -0.3, 0.2),
        grid_record(as_planned=[45.0, 55.0], **{"8_together": [60.0, 40.0], "2_together": [20.0, 30.0]}),
        memory_record(0.9, 0.99),
        cache_record(),
        trace_record(),
    ]
    page = write_page(tmp_path, *records)
    assert page.index("**In short: Abacus, 2 cores, 24 GiB**") < page.index("## How it is measured")
    found = {claim: cells[:3] for claim, cells in rows_of(page, "In short").items()}
    assert found == {
        "decode, batch 1, bfloat16: tokens/s compared with the limit of memory bandwidth (mine)": [
            "50.0 (40.0-60.0)",
            "200.0",
            "0.25 (0.20-0.30)",
        ],
        "serving, 4 arrivals/s: tokens/s compared with padded batches on the same kernels": [
            "30.0 (30.0-30.0)",
            "15.0 (10.0-20.0)",
            "2.25 (1.50-3.00)",
        ],
        "a job of 80 prompts, 32 new: tokens/s compared with padded batches": ["300.0", "100.0", "3.00"],
        "interactive requests next to a batch job: p99 of ms per token, compared with alone": ["40.0", "20.0", "2.00"],
        "perplexity in int8 compared with float32 (mine)": ["10.100", "10.000", "1.0100 (± 0.0020)"],
        "plans: median error of 3 speeds, compared with measurements": ["20.0%", "0%", "at most 30.0%"],
        "the plan compared with the best of 3 settings: tokens/s": ["50.0 (45.0-55.0)", "50.0 (45.0-55.0)", "1.00"],
        "`--memory`: the most that 2 runs held, as a share of the limit": ["99.0%", "100%", "0.945 (0.900-0.990)"],
        "an expert cache that holds all experts: ms per step compared with the resident model": [
            "11.00",
            "10.00",
            "1.100",
        ],
        "`--trace`: ms per pass compared with passes without it": ["20.200", "20.000", "1.010"],
    }
    headings = {line.lstrip("# ") for line in page.splitlines() if line.startswith("### ")}
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"\]\(#([a-z-]+)\)", page))
    assert linked
    assert linked <= anchors
    assert rows_of(page, "Predicted and measured")["--quantize int8: decode 1"][:3] == [
        "70 tokens/s",
        "100 tokens/s",
        "-30.0%",
    ]
    assert rows_of(page, "The plan against a grid")["2 together"] == ["25.0 (20.0-30.0)", "50.0%"]
    assert rows_of(page, "Decode passes with")["traced"] == ["20.200", "+1.00%"]


def test_processor_time_of_http_processes_has_a_section(tmp_path):
    rounds = [{"channel": "ipc", "path": "/v1/completions", "streams": 64, "server_us": 48.9, "fronts_us": 0.0}]
    record = {**forms_record(), "kind": "front_cost", "fronts": 1, "rounds": [rounds[0] | {"tokens_per_s": 1996.3}]}
    page = write_page(tmp_path, record)
    assert "### HTTP processes" in page
    assert rows_of(page, "Processor time for a streamed token")["ipc"] == ["/v1/completions", "64", "49", "0", "1996"]


def test_only_comparisons_with_engines_built_by_hand_are_of_uncommitted_code():
    """All others run from a clone, so they are measured again instead."""
    found = read(sorted((ROOT / "docs" / "studies" / "results").glob("*.jsonl")))
    assert [record["command"] for record in found if is_dirty(record) and "BIGMOE" not in record["command"]] == []


def test_schemas_and_the_page_have_sections(tmp_path):
    phone = streaming_record(rate=1000.0, is_phone=True)
    page = write_page(tmp_path, forms_record(), streaming_record(), phone, load_record())
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    assert headings == [
        "### What a JSON schema costs",
        "### The page while an answer streams",
        "### The page's first load",
    ]
    assert rows_of(page, "A decode step, ms")["batch 8"][2] == "1.10 (0.60-1.25)"
    assert "10,000 tokens come, 200 a second: a large window" in page
    assert "10,000 tokens come, 1000 a second: a small window, the processor slowed down four times" in page


def test_what_was_measured_with_uncommitted_changes_is_marked(tmp_path):
    marked = "commit 1a2b3c4 **with changes that were not committed: to be measured again**"
    for changes, is_marked in (
        ({"commit": "1a2b3c4+"}, True),
        ({"is_dirty": True}, True),
        ({"is_dirty": False}, False),
    ):
        page = write_page(tmp_path, {**quality_record(), **changes})
        assert (marked in page) == is_marked
        assert ("[2026-01-31, uncommitted changes](#quality)" in page) == is_marked


def peers_record(name: str = "decode, batch 1", ours: float = 25.0, foreign: float = 0.05) -> dict:
    rate = {"name": name, "unit": "tokens/s", "ours": [ours + 5, ours - 5], "peer": [10.0, 10.0]}
    row = {**rate, "foreign_cpu": {"ours": [foreign], "peer": [0.0]}}
    about = {"format": "int8", "ours": "moeflow int8", "peer": "llama.cpp q8_0", "peer_versions": {}}
    sampling = {"ours": "none", "peer": "none"}
    return {**quality_record(), "kind": "peers", **about, "sampling": sampling, "rows": [row]}


def test_what_others_disturbed_is_no_claim(tmp_path):
    for foreign, is_there in ((0.05, True), (0.2, False)):
        page = write_page(tmp_path, peers_record(foreign=foreign))
        row = "| decode, batch 1, int8: tokens/s compared with llama.cpp on the same file | 25.0 (20.0-30.0) |"
        assert (row in page) == is_there


def test_of_each_row_of_a_comparison_the_newest_counts_in_whatever_record_it_is(tmp_path):
    records = [peers_record(ours=25.0), peers_record(ours=35.0), peers_record("prefill 4096", ours=45.0)]
    page = write_page(
        tmp_path, *({**record, "time": f"2026-02-0{day}T00:00:00+00:00"} for day, record in enumerate(records, 1))
    )
    assert "| decode, batch 1, int8 | 35.0 |" in page
    assert "| prefill 4096, int8 | 45.0 |" in page
    assert "25.0 (20.0-30.0)" not in page


def test_a_peers_build_for_the_machine_takes_the_place_of_the_one_that_stood_in(tmp_path):
    wheel = {**peers_record(ours=25.0), "peer": "ik_llama.cpp q8_0, AVX2", "time": "2026-02-01T00:00:00+00:00"}
    native = {**peers_record(ours=35.0), "peer": "ik_llama.cpp q8_0", "time": "2026-02-02T00:00:00+00:00"}
    page = write_page(tmp_path, wheel, native)
    assert "| decode, batch 1, int8 | 35.0 | ik_llama.cpp q8_0 10.0 |" in page
    assert "AVX2" not in page.split("## ")[-1]
    assert "25.0 (" not in page


def offload_record(**decode: float) -> dict:
    rows = [{"name": name, "prefill": [1.0, 1.0], "decode": [rate, 2 * rate]} for name, rate in decode.items()]
    return {**quality_record(), "kind": "offload", "budgets": [{"share": 0.5, "rows": rows}]}


def test_a_model_larger_than_memory_stands_beside_the_strongest_rival():
    rates = {"llama.cpp, mapped": 1.0, "BigMoeOnEdge": 10.0, "moeflow": 20.0, "moeflow, no prediction": 30.0}
    (claim,) = claims([offload_record(**rates)])
    assert (claim.ours, claim.baseline) == ("30.00 (20.00-40.00)", "BigMoeOnEdge: 15.00 (10.00-20.00)")
    assert claim.ratio == "2.00 (2.00-2.00)"
    assert claims([offload_record(moeflow=20.0)]) == []


@pytest.mark.parametrize("is_dirty", [False, True])
def test_the_readme_shows_committed_code_only(is_dirty):
    record = offload_record(moeflow=20.0, BigMoeOnEdge=10.0) | {"is_dirty": is_dirty}
    assert ("BigMoeOnEdge" in readme_table("a machine", claims([record]))) is not is_dirty


def test_page_and_readme_are_what_the_records_say(tmp_path, monkeypatch):
    """A new record requires a new page. Its pictures are composed, but not rendered: no test looks at them."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    (tmp_path / "docs" / "studies").mkdir(parents=True)
    shutil.copyfile(ROOT / "README.md", tmp_path / "README.md")
    write(ROOT / "docs" / "studies" / "results", tmp_path / "docs" / "studies")
    for name in ("docs/studies/benchmarks.md", "README.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"run `python -m studies.report` for {name}"
    figures = rows_of((ROOT / "README.md").read_text(), "Measured on")
    assert 4 <= len(figures) <= NUM_README
    assert figures.keys() <= rows_of((ROOT / "docs" / "studies" / "benchmarks.md").read_text(), "In short").keys()


def test_a_readme_without_a_place_for_figures_is_an_error(tmp_path):
    (tmp_path / "README.md").write_text("# mine")
    with pytest.raises(ConfigError, match="put them where figures belong"):
        write_page(tmp_path, quality_record())
    assert (tmp_path / "README.md").read_text() == "# mine"


def test_drafts_by_depth_trees_beside_chains_and_llama_cpp(tmp_path):
    old = speculation_record(9.75) | {"time": "2025-01-01T00:00:00+00:00"}
    page = write_page(tmp_path, old, speculation_record(1.5), drafting_record(1.25))
    assert "### Drafted tokens\n" in page
    assert "9.75" not in page
    assert "| chat | suffix | 10.0 | 15.0 | 1.50x (1.25-1.75) | 1.30 | 0.30 of 0.60 |" in page
    assert "| suffix | 6 of 12 | 62% | 25% |" in page
    assert "| chat | 1 | 2 | 1.20 / 1.20 | 0.60 / 0.40 | 1.50 | 15.0 / 15.0 |" in page
    assert "![Right drafts by tokens ahead, and speed-ups](images/speculation-1.png)" in page
    assert (tmp_path / "docs" / "studies" / "images" / "speculation-1.png").stat().st_size > 5000
    assert "### Drafted tokens beside llama.cpp\n" in page
    assert "| moeflow, suffix | 12.5 | 1.25 (1.00-1.50) | 0.30 of 0.60 | 1.25 |" in page
    assert "| llama.cpp, none | 12.5 |  |  |  |" in page
    assert "of 8 plain answers 7 were the same" in page
