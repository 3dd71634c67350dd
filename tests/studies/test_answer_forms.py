"""The cost of a schema: steps with and without one are distinguished, recorded and shown."""

from __future__ import annotations

import json

import pytest

from studies.answer_forms import table
from tests.bench.examples import forms_record
from tests.studies import running
from tests.tiny_mixtral import write_tiny_mixtral


def test_the_table_has_medians_and_ratios_of_each_round():
    (row,) = table(forms_record()).rows
    assert row == ("batch 8", "10.00 (8.00-20.00)", "11.00 (10.00-12.00)", "1.10 (0.60-1.25)")


@pytest.mark.slow
def test_a_record_has_each_round_of_each_batch_size(tmp_path):
    model, out = tmp_path / "mine", tmp_path / "out.jsonl"
    model.mkdir()
    write_tiny_mixtral(model)
    asked = ("--model", str(model), "--batch", "1", "--batch", "2", "--tokens", "16", "--rounds", "2")
    assert running.run("studies.answer_forms", *asked, "--out", str(out)).exit_code == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    assert [row["batch_size"] for row in record["rows"]] == [1, 2]
    assert all(len(row[name]) == 2 for row in record["rows"] for name in ("plain_s", "formed_s"))
