"""Records as tables and pictures: the figures that a reader sees, from records made up by hand."""

from __future__ import annotations

import pytest

from moeflow.bench.plots import plot_latencies
from moeflow.bench.tables import Table, engine_table, quality_table, serve_tables, spread_text
from studies.families_table import versus_table
from studies.report.plots import plot_throughput
from tests.bench.examples import engine_record, quality_record, serve_record, versus_record

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_table_as_markdown():
    table = Table("Title", ("", "a|b"), (("row", "1"),), ("A note.",))
    assert table.to_markdown() == "**Title**\n\n|  | a\\|b |\n| --- | ---: |\n| row | 1 |\n\nA note.\n"


def test_a_spread_is_written_with_its_range():
    assert spread_text([2.0, 1.0, 4.0]) == "2.0 (1.0-4.0)"
    assert spread_text([2.345], 2) == "2.35"


def test_the_engines_table_holds_rates_against_what_the_machine_can_do():
    """100 tokens in 2 s at 1 GB read a run of 100: 0.5 GB/s of 2; 3 GFLOP a run: 1.5 of 6 GFLOP/s."""
    table = engine_table(engine_record())
    assert table.rows[0] == ("decode, batch 4", "50.0 (40.0-60.0)", "200.0", "25%", "25%")
    notes = " ".join(table.notes)
    assert "Loaded in 1.50 s" in notes
    assert "2.0 (1.0-3.0) GB/s" in notes
    assert "with 2 threads" in notes
    assert "Not run: prefill 2048: too long." in notes
    assert "Interrupted" not in notes


def test_an_interrupted_run_is_marked_and_needs_no_ceilings():
    table = engine_table(engine_record(is_complete=False, read_bytes_per_s=[], fp32_flops_per_s=[]))
    assert table.rows[0] == ("decode, batch 4", "50.0 (40.0-60.0)", "", "", "")
    assert table.notes[-1].startswith("Interrupted")


def test_serving_tables_compare_the_same_traffic():
    records = [
        serve_record("continuous", rate=4.0, seed=0, requests_per_s=3.0),
        serve_record("static", rate=4.0, seed=0, requests_per_s=2.0),
        serve_record("continuous", rate=4.0, seed=1, requests_per_s=4.0),
        serve_record("static", rate=4.0, seed=1, requests_per_s=1.0),
        serve_record("continuous", rate=2.0, seed=0, requests_per_s=2.0),
    ]
    requests, tokens, latency = serve_tables(records)
    assert requests.columns == ("arrivals/s", "continuous", "static", "continuous / static")
    assert requests.rows == (
        ("2", "2.00", "", ""),
        ("4", "3.50 (3.00-4.00)", "1.50 (1.00-2.00)", "2.75 (1.50-4.00)"),
    )
    assert tokens.rows[0][:2] == ("2", "20.0")
    assert [row[0] for row in latency.rows] == [
        "2 arrivals/s, continuous",
        "4 arrivals/s, continuous",
        "4 arrivals/s, static",
    ]
    assert latency.rows[0][1:4] == ("1500", "500", "2500")
    assert latency.notes == ()


def test_serving_tables_compare_drafts_with_none():
    records = [
        serve_record("continuous", rate=4.0, seed=0, requests_per_s=2.0),
        serve_record("continuous, suffix", rate=4.0, seed=0, requests_per_s=3.0),
        serve_record("static", rate=4.0, seed=0, requests_per_s=1.0),
    ]
    requests = serve_tables(records)[0]
    assert requests.columns[4:] == ("continuous / static", "continuous, suffix / continuous")
    assert requests.rows == (("4", "2.00", "3.00", "1.00", "2.00", "1.50"),)


def test_a_server_alone_has_no_ratio_and_failures_are_told():
    record = serve_record("server", rate=1.0, seed=0, requests_per_s=1.0)
    record["summary"]["num_failed"] = 2
    record["errors"] = {"429: full": 2}
    requests, _, latency = serve_tables([record])
    assert requests.columns == ("arrivals/s", "server")
    assert latency.notes == ("2 requests failed: 429: full.",)


def test_a_run_in_which_all_failed_is_told_too():
    record = serve_record("server", rate=1.0, seed=0, requests_per_s=1.0)
    record |= {"summary": {"num_requests": 4, "num_failed": 4}, "errors": {"gone": 4}}
    requests, _, latency = serve_tables([record])
    assert requests.rows == latency.rows == ()
    assert latency.notes == ("4 requests failed: gone.",)


def test_the_other_tables():
    assert quality_table([quality_record()]).rows == (
        ("mine, int8", "10.000 (float32)", "10.100", "+1.00% ± 0.20", "97.5%", "80.0%", "1,000", "3.0 MiB"),
    )
    assert quality_table([quality_record() | {"has_importance": True}]).rows[0][0] == "mine, int8, by importance"
    assert quality_table([quality_record() | {"kv_dtype": "int8"}]).rows[0][0] == "mine, int8, K and V in int8"
    assert versus_table(versus_record()).rows == (
        ("decode, batch 1", "20.0 (10.0-30.0)", "10.0 (10.0-10.0)", "2.00 (1.00-3.00)", "3/3"),
    )


@pytest.mark.slow  # importing matplotlib
def test_pictures_are_drawn_even_of_failed_requests(tmp_path):
    records = [serve_record(name, rate=4.0, seed=0, requests_per_s=3.0) for name in ("continuous", "static")]
    records[1]["requests"]["latency_s"] = [None, None]
    plot_latencies({r["system"]: [r["requests"]] for r in records}, 4.0, tmp_path / "new" / "latency.png")
    plot_throughput({r["system"]: [r] for r in records}, tmp_path / "throughput.png")
    for file in (tmp_path / "new" / "latency.png", tmp_path / "throughput.png"):
        assert file.read_bytes().startswith(PNG)
