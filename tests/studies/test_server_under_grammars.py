"""The attack with grammars, short and on a tiny model, and the figures made of it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from moeflow.server.api.chat.chat_objects import ChatRequest
from moeflow.server.config import ServerConfig
from studies.server_under_grammars import ATTACKS, GrammarPhase, body_of, main, numbered, summary_of, table
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.mark.parametrize("name", ATTACKS)
def test_each_request_is_valid_and_another_one(name):
    bodies = [numbered(body_of(ATTACKS[name]()), number) for number in range(3)]
    for body in bodies:
        ChatRequest.model_validate_json(body)
        assert len(body) < ServerConfig().max_body_bytes
    assert len(set(bodies)) == (1 if name == "no grammar" else 3)


def test_the_table_shows_what_was_seen():
    phase = GrammarPhase("slow", health_s=[0.001] * 99 + [0.5], gaps_s=[0.02], forms_s=[0.3, 0.4])
    phase.answers["429"] = 7
    row = table({"attackers": 5, "streams": 1, "phases": [summary_of(phase)]}).rows[0]
    assert row == ("slow", "1", "500", "500", "20", "20", "20", "400", "400", "7 x 429")


@pytest.mark.thorough
def test_a_short_attack(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    model.mkdir()
    write_tiny_mixtral(model)
    limits = ["--attack", "5,000 properties", "--attackers", "2", "--streams", "1", "--seconds", "3"]
    done = CliRunner().invoke(main, [str(model), *limits, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    quiet, attacked = record["phases"]
    assert quiet["answers"] == {}
    assert "200" not in attacked["answers"]
    for phase in (quiet, attacked):
        assert phase["health_ms"]["count"] > 0
        assert phase["form_ms"]["count"] > 0
        assert phase["problems"] == []
