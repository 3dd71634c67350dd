"""docs/benchmarks.md from records: the newest of each, where they come from, and nothing that is not in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.examples import beside_record, engine_record, job_record, quality_record, serve_record, versus_record

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow  # a process of its own, with matplotlib


def write_page(tmp_path: Path, *records: dict, text: str | None = None) -> subprocess.CompletedProcess:
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir(exist_ok=True)
    docs.mkdir(exist_ok=True)
    lines = [json.dumps(record) for record in records]
    (results / "all.jsonl").write_text("\n".join(lines) if text is None else text)
    command = [sys.executable, str(ROOT / "scripts" / "benchmarks_page.py"), str(results), str(docs)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_holds_the_newest_of_each(tmp_path):
    old = engine_record(time="2025-01-01T00:00:00+00:00", load_s=99.0)
    serving = [serve_record(name, rate=4.0, seed=0, requests_per_s=2.0) for name in ("continuous", "static")]
    earlier = serve_record("static", rate=8.0, seed=0, requests_per_s=2.0) | {
        "time": "2025-01-01T00:00:00+00:00",
        "commit": "0000000",
    }
    done = write_page(tmp_path, engine_record(), old, earlier, *serving, quality_record(), versus_record())
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
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
    assert all((tmp_path / "docs" / picture).stat().st_size > 1000 for picture in pictures)


def test_servers_under_the_same_traffic_share_a_table_and_other_traffic_has_its_own(tmp_path):
    served = [serve_record(name, rate=4.0, seed=0, requests_per_s=2.0) for name in ("mine", "theirs")]
    for record, command in zip(served, ("bench --url a", "bench --url b"), strict=True):
        record |= {"model": "servers", "weight_format": None, "device": None, "command": command}
    other = {**served[0], "workload": {"seed": 0, "num_requests": 9}}
    assert write_page(tmp_path, *served, other).returncode == 0
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "| arrivals/s | mine | theirs |" in page
    assert "| arrivals/s | mine |\n" in page
    assert page.count("`bench --url b`") == 1
    assert "**Requests/s: servers**" in page


def test_without_records_the_page_says_so(tmp_path):
    assert write_page(tmp_path).returncode == 0
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "There are no records" in page
    assert "## How it is measured" in page


def test_a_damaged_record_is_one_line(tmp_path):
    done = write_page(tmp_path, text="{")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "all.jsonl, line 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_jobs_of_one_engine_share_a_table(tmp_path):
    jobs = [job_record(system, num_new) for num_new in (32, 64) for system in ("variable length", "padded")]
    done = write_page(tmp_path, *jobs)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "### Batch jobs" in page
    rows = [line for line in page.splitlines() if line.startswith("| mtbench")]
    assert [row.split("|")[-2].strip() for row in rows] == ["3.00", "3.00"]


def test_interactive_requests_of_all_seeds_are_taken_together(tmp_path):
    old = beside_record(9, command="moeflow bench batch --beside 0.25 -n 9", time="2025-01-01T00:00:00+00:00")
    done = write_page(tmp_path, old, beside_record(0), beside_record(1))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "8 interactive requests." in page
    assert "| per token p50, ms | 10.0 | 20.0 | 2.00 |" in page
    assert "| per token p99, ms | 30.0 | 60.0 | 2.00 |" in page
    assert "| job, tokens/s | 200.0 | 126.7 | 0.63 |" in page
