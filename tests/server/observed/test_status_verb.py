"""`moeflow status` against the server's own application."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from moeflow.cli import status as verb
from moeflow.cli.status import status
from moeflow.core.engine_messages import EngineStats, RankStats
from moeflow.core.errors import ConfigError, EngineError
from moeflow.engine.client import EngineState, ReplicaStatus
from tests.server.live_server import serve_in_thread

BUSY = EngineStats(
    num_running=3, num_waiting=1, tokens_per_second=41.6, kv_blocks_total=8, kv_blocks_used=2, engine_restarts_total=5
)
RANK = RankStats(host="", first_layer=0, num_layers=1, num_experts=0, busy_s_total=0.0, waited_s_total=0.0)


@pytest.fixture
def url(make_app, engine):
    engine.snapshot = BUSY
    engine.replica_statuses = [
        ReplicaStatus(EngineState.READY, BUSY, host="b"),
        ReplicaStatus(EngineState.READY, EngineStats(ranks=2 * [RANK])),
        ReplicaStatus(EngineState.RESTARTING, EngineStats(), host="c", activity="pulling o/m: 40%"),
    ]
    with serve_in_thread(make_app(api_key="secret")) as url:
        yield url


def run(*arguments: str) -> str:
    return CliRunner().invoke(status, arguments, catch_exceptions=False).output


def test_every_engine_is_a_row_with_its_machine_and_load(url):
    lines = run(url, "--api-key", "secret").splitlines()
    assert lines[0].startswith(f"{url}: ready, ")
    assert lines[1:4] == ["2 of 3 engines ready; 3 running, 1 waiting, 42 tokens/s", "jobs: none", ""]
    assert lines[4:] == [
        "REPLICA  HOST      STATE             RUNNING  WAITING  TOKENS/S   KV  RESTARTS",
        "0        b         ready                   3        1        42  25%         5",
        "1        (server)  ready, 2 ranks          0        0         0   0%         0",
        "2        c         pulling o/m: 40%        0        0         0   0%         0",
    ]


def test_json_has_the_same_for_programs(url):
    found = json.loads(run(url, "--json", "--api-key", "secret"))
    assert (found["url"], found["status"], found["jobs"]) == (url, "ready", {})
    assert [(it["host"], it["state"], it["kv_share"]) for it in found["replicas"]] == [
        ("b", "ready", 0.25),
        ("", "ready", 0.0),
        ("c", "restarting", 0.0),
    ]


def test_watching_repeats_until_it_is_interrupted(url, monkeypatch):
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(verb.time, "sleep", sleep)
    result = CliRunner().invoke(status, [url, "--watch", "--json", "--api-key", "secret"], standalone_mode=False)
    assert isinstance(result.exception, click.Abort | KeyboardInterrupt)
    assert len([json.loads(line) for line in result.output.splitlines() if line.startswith("{")]) == 2


def test_no_server_a_wrong_key_and_no_address_are_errors(url):
    with pytest.raises(EngineError, match=r"no server of moeflow answers at http://127\.0\.0\.1:9"):
        run("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="key"):
        run(url, "--api-key", "wrong")
    with pytest.raises((ConfigError, EngineError), match="server"):
        run("127.0.0.1:8000")
