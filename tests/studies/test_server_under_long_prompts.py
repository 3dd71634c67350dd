"""The attack on a server, short and on a tiny model, and the figures made of it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from moeflow.server.config import ServerConfig
from studies.server_under_long_prompts import BODY_BYTES, Attack, Phase, attacks, main, quantile, summary, table
from tests.marks import thorough_unless
from tests.tiny_mixtral import write_tiny_mixtral


def test_bodies_are_as_large_as_the_server_takes():
    for attack in (kind for kind in attacks() if isinstance(kind, Attack)):
        assert BODY_BYTES * 0.98 < len(attack.body) <= ServerConfig().max_body_bytes
        json.loads(attack.body)


def test_quantiles_are_in_milliseconds():
    values = [0.001 * i for i in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1)) == (51, 100, 100)
    assert quantile([], 0.5) == 0


def test_the_table_shows_what_was_seen():
    phase = Phase("text", health_s=[0.001] * 99 + [0.5], gaps_s=[0.02], peak_bytes=3 * 2**20)
    phase.answers["400"] = 7
    row = table({"attackers": 5, "streams": 1, "phases": [summary(phase)]}).rows[0]
    assert row == ("text", "1", "500", "500", "20", "20", "20", "7 x 400", "3")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "answers"),
    thorough_unless(
        lambda name, _: name == "text",
        [("text", {"400"}), ("stored responses", {"200"}), ("silent connections", {"open"})],
    ),
)
def test_a_short_attack(tmp_path, name, answers):
    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    model.mkdir()
    write_tiny_mixtral(model)
    limits = ["--attack", name, "--attackers", "1", "--streams", "1", "--seconds", "1.5"]
    done = CliRunner().invoke(main, [str(model), *limits, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    quiet, text = record["phases"]
    assert quiet["answers"] == {}
    assert set(text["answers"]) == answers
    for phase in (quiet, text):
        assert phase["health_ms"]["count"] >= 20  # of 150 on an idle machine
        assert phase["token_gap_ms"]["count"] > 0
        assert phase["peak_mib"] > 50
        assert phase["problems"] == []
