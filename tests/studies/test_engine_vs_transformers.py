"""The engine against transformers, on a tiny model: the records, and the table of families."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from studies.engine_vs_transformers import CASES, main
from studies.families_table import families_table, is_family
from tests.bench.examples import family_record, versus_record
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.mark.thorough
def test_rates_answers_and_what_is_read_are_recorded(tmp_path):
    """Prompts of 256 tokens and 63 passes of 8 meet all experts: each pass reads all matrices but the embedding."""
    model, out = tmp_path / "mixtral", tmp_path / "out.jsonl"
    model.mkdir()
    written = write_tiny_mixtral(model, max_position_embeddings=1024)
    asked = ["--case", "decode, batch 8", "--repeats", "1", "--out", str(out)]
    done = CliRunner().invoke(main, [str(model), *asked], catch_exceptions=False)
    assert done.exit_code == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    (case,) = record["cases"]
    assert case["equal_answers"] == "16/16"
    assert all(len(rates) == 1 and rates[0] > 0 for rates in case["tokens_per_s"].values())
    assert len(record["read_bytes_per_s"]) == 1

    assert record["num_parameters"] == sum(it.numel() for it in written.parameters() if it.dim() > 1)
    matrices = [it for it in written.parameters() if it.dim() > 1 and it is not written.get_input_embeddings().weight]
    weights = 4 * sum(it.numel() for it in matrices)
    config = written.config
    head_dim = config.hidden_size // config.num_attention_heads
    of_position = 2 * 4 * config.num_key_value_heads * head_dim * config.num_hidden_layers
    keys_and_values = [8 * seen * of_position for seen in range(33, 96)]
    assert case["num_bytes"] == pytest.approx(64 * weights + sum(keys_and_values), rel=0.01)
    assert len(keys_and_values) == CASES[1].new_tokens - 1


def test_families_are_rows_sorted_by_how_many_times_as_fast():
    records = [family_record("mixtral", 30.0, 20.0), family_record("llama", 40.0, 25.0)]
    assert families_table(records).rows == (
        ("llama", "40.0", "10.0", "4.00", "25.0", "10.0", "2.50"),
        ("mixtral", "30.0", "10.0", "3.00", "20.0", "10.0", "2.00"),
    )
    (note,) = families_table(records).notes
    assert "4 of 8 answers" in note


def test_what_bandwidth_allows_is_shown_where_it_was_recorded():
    """A call of 32 requests reads 1 GB for 2,048 tokens: at 2 GB/s, 4,096 tokens/s."""
    known: dict[str, Any] = family_record("mixtral", 30.0, 20.0) | {"read_bytes_per_s": [1e9, 2e9, 3e9]}
    known["cases"][1]["num_bytes"] = 1e9
    table = families_table([known, family_record("llama", 20.0, 20.0)])
    assert table.columns[-1] == "bandwidth allows, 32"
    assert [row[-1] for row in table.rows] == ["4096", ""]


def test_a_model_that_has_a_name_of_its_own_is_no_family():
    assert is_family(family_record("mixtral", 30.0, 20.0))
    assert not is_family(family_record("SmolLM2", 30.0, 20.0))
    assert not is_family(versus_record() | {"model": "mixtral", "weight_format": "bfloat16"})
    assert not is_family(family_record("mixtral", 30.0, 20.0) | {"weight_format": "float32"})
