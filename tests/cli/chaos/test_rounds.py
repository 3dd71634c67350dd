"""The check finds violations: a stand-in for a server loses, doubles or changes tokens once a fault begins."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from moeflow.cli.chaos.faults import Fault, Scene
from moeflow.cli.chaos.processes import Processes
from moeflow.cli.chaos.proxy import Proxy
from moeflow.cli.chaos.rounds import Load, Rounds, Row, fields
from moeflow.cli.chaos.table import chaos_table

LENGTH = 12


class Handler(BaseHTTPRequestHandler):
    """Counts words, with the mistake that its server names."""

    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not body.get("stream"):
            return self.answer(200, {"choices": [{"text": "word"}]})
        if self.server.wrong == "refused":
            return self.answer(503, {"error": {"message": "no"}}, {"Retry-After": "1"} if self.server.is_proper else {})
        self.send_response(200)
        self.end_headers()
        words = [f" {number}" for number in range(LENGTH)]
        if self.server.wrong == "lost":
            del words[5]
        elif self.server.wrong == "doubled":
            words.insert(5, words[5])
        elif self.server.wrong == "changed":
            words[5] = " x"
        reason = "stop" if self.server.wrong == "reason" else "length"
        try:
            for word in words:
                time.sleep(0.002)
                self.send({"choices": [{"index": 0, "text": word, "finish_reason": None}]})
            self.send({"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
            if self.server.wrong != "cut":
                number = LENGTH + 1 if self.server.wrong == "count" else LENGTH
                self.send({"choices": [], "usage": {"completion_tokens": number}})
                self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass

    def do_GET(self) -> None:
        ready = 1 if self.server.wrong == "unhealthy" else 2
        known = {
            "/health": {"status": "ready", "num_replicas": 2, "num_replicas_ready": ready},
            "/stats": {"num_unfinished": 0, "kv_blocks_used": 0},
        }
        found = known.get(self.path)
        self.answer(404 if found is None else 200, found or {})

    def send(self, event: dict) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def answer(self, status: int, body: dict, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


class StandIn(ThreadingHTTPServer):
    """A server that does this wrong; nothing, at first."""

    daemon_threads = True
    wrong = ""
    is_proper = False


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def disturbed(server: StandIn, wrong: str, **of_fault) -> Row:
    """Run a round: the server begins to do this wrong with the fault, and stops with it."""

    def begin(scene: Scene) -> None:
        server.wrong = wrong
        scene.undo.callback(setattr, server, "wrong", "")
        if wrong == "reset":
            scene.front.reset()

    async def run(rounds: Rounds) -> Row:
        async with rounds:
            await rounds.learn()
            return await rounds.run(Fault("test", begin, lasts=True, **of_fault), lambda: None)

    with closing(Proxy(server.server_port)) as front:
        scene = Scene(Processes(psutil.Process()), front, server.server_port, random.Random(0))
        load = Load(num_streams=2, num_tokens=LENGTH, fault_s=0.2)
        return asyncio.run(run(Rounds(scene, f"http://127.0.0.1:{server.server_port}", load)))


def test_a_server_that_does_all_right_is_good(server):
    row = disturbed(server, "")
    assert row.is_good, row.problems
    assert row.num_equal == row.num_streams >= 2


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("lost", "differs at character 11: '6 7"),
        ("doubled", "differs at character 13: '5 6"),
        ("changed", "differs at character 11: 'x 6"),
        ("reason", "finish_reason {0: 'stop'} instead of {0: 'length'}"),
        ("count", "13 tokens instead of 12"),
        ("cut", "the stream ended without [DONE]"),
        ("refused", '503 {"error": {"message": "no"}}'),
    ],
)
def test_a_violation_is_found(server, wrong, problem):
    row = disturbed(server, wrong)
    assert not row.is_good
    assert any(problem in each for each in row.problems), row.problems
    table = chaos_table({"rows": [fields(row)]})
    assert table.rows[0][-1] == "VIOLATED"
    assert problem in table.notes[0]


def test_a_refusal_with_a_time_to_come_again_is_no_violation(server):
    server.is_proper = True
    row = disturbed(server, "refused")
    assert row.is_good, row.problems
    assert row.num_refused > 0


def test_connections_that_the_fault_cuts_are_counted_apart(server):
    row = disturbed(server, "reset", cuts_clients=True)
    assert row.is_good, row.problems
    assert row.num_equal + row.num_cut == row.num_streams


def test_a_fault_that_health_shows_has_its_times(server):
    row = disturbed(server, "unhealthy", seen_from_s=0.0)
    assert row.is_good, row.problems
    assert 0 <= row.seen_s < row.back_s
