"""`python -m studies.paper moe-lightning` as a user runs it, without the searches: tests of its output make those."""

from __future__ import annotations

import importlib
import json

import pytest

from studies.paper.one_device import CELLS
from tests.studies import running

paper = importlib.import_module("studies.paper.moe_lightning")


@pytest.fixture
def shortened(monkeypatch):
    cell = CELLS[0]
    rows = [
        {
            "system": row.system.name,
            "micro_batch": row.micro_batch,
            "num_micro_batches": row.num_micro_batches,
            "published": row.tokens_per_s,
            "predicted": {"data sheets": row.tokens_per_s * 1.5, "loop": row.tokens_per_s * 1.1},
        }
        for row in cell.rows
    ]
    orders = {"data sheets": (5, 6), "loop": (6, 6)}
    made = {"source": cell.source, "title": cell.title, "rows": rows, "pairs_in_order": orders}
    monkeypatch.setattr(paper, "predictions", lambda told: [made])
    monkeypatch.setattr(
        paper,
        "scaling",
        lambda: [{"title": "DBRX", "gen_len": 32, "predicted": [10.0, 25.0], "published": [10.0, 20.0]}],
    )
    points = [
        {"link_gb_per_s": link, "host": host, "weights_on_host": 0.5, "attends_on_host": False, "host_is_ahead": True}
        for host in paper.HOSTS
        for link in paper.LINK_GB_PER_S
    ]
    monkeypatch.setattr(paper, "case_study", lambda: points)


@pytest.mark.usefixtures("shortened")
def test_tables_and_what_each_term_changes():
    shown = running.run("studies.paper", "moe-lightning")
    assert shown.exit_code == 0, shown.output
    for text in (
        "+10%",
        "+50%",
        "2.50",
        "50% +",
        "Figure 10",
        "Up to loop: of 4 figures 4 within 35%, 4 within 20%",
    ):
        assert text in shown.output


@pytest.mark.usefixtures("shortened")
def test_a_record_for_machines(tmp_path):
    shown = running.run("studies.paper", "moe-lightning", "--json", "--out", str(tmp_path / "paper.jsonl"))
    record = json.loads(shown.stdout)
    assert record["kind"] == "paper"
    assert record["cells"][0]["rows"][0]["published"] == CELLS[0].rows[0].tokens_per_s
    assert json.loads((tmp_path / "paper.jsonl").read_text()) == record
