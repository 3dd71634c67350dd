"""The requests of an agent with tools, measured on a tiny model, and the figures made of them."""

from __future__ import annotations

import json

import pytest
from click import ClickException
from click.testing import CliRunner

from moeflow.server.api.chat.chat_objects import ChatRequest
from studies.agent_tools import MODES, main, request, table, tools
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.mark.parametrize("mode", MODES)
def test_each_request_is_valid_and_another_one(mode):
    offered = tools(30)
    bodies = [json.dumps(request(mode, offered, number)) for number in range(3)]
    assert len(set(bodies)) == 3
    for body in bodies:
        found = ChatRequest.model_validate_json(body)
        assert len({tool.function.name for tool in found.tools}) == 30
        assert all(bool(tool.function.strict) is (mode == "strict") for tool in found.tools)
        assert found.tool_choice == ("required" if mode == "required" else "auto")


def test_only_so_many_tools_are_there():
    with pytest.raises(ClickException, match="ask for fewer"):
        tools(1000)


def test_the_table_shows_what_is_no_prefill():
    times = {"cold_byte_ms": 9.0, "warm_byte_ms": 8.0, "warm_token_ms": 40.0, "prompt_tokens": 6000}
    modes = [
        {"mode": "auto", "cold_token_ms": 12_030.0, **times},
        {"mode": "bare prompt", "cold_token_ms": 12_000.0, **times},
    ]
    stalls = [{"name": "nothing", "gap_ms": {"p50": 25.0, "max": 31.0}}]
    rows = table({"num_tools": 30, "rounds": 5, "modes": modes, "stalls": stalls}).rows
    assert rows[0] == ("auto", "6,000", "9", "12,030", "+30", "8", "40")
    assert rows[2][0] == "a stream beside nothing"
    assert rows[2][-1] == "gap 25, at most 31"


@pytest.mark.thorough
def test_a_short_measurement(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    model.mkdir()
    write_tiny_mixtral(model, max_position_embeddings=4096)
    limits = ["--tools", "2", "--rounds", "1", "--seconds", "1"]
    done = CliRunner().invoke(main, [str(model), *limits, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    assert [mode["mode"] for mode in record["modes"]] == [*MODES, "bare prompt"]
    for mode in record["modes"]:
        assert mode["prompt_tokens"] == record["modes"][-1]["prompt_tokens"]
        assert mode["cached_tokens"] > 0
    quiet, busy = record["stalls"]
    assert (quiet["answers"], busy["answers"].keys()) == ({}, {"200"})
    assert quiet["gap_ms"]["count"] > 0
    assert busy["problems"] == []
