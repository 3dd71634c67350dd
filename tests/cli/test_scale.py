"""`moeflow scale` against a server that stands in for a real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from click.testing import CliRunner

from moeflow.cli.scale import scale
from moeflow.core.errors import ConfigError, EngineError


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str | None, dict]]] = []
    num_ready = 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).asked.append((self.headers["authorization"], body))
        if body["num_replicas"] == 7:
            self.answer(400, {"error": {"message": "the number of engines on one machine is fixed"}})
        else:
            self.answer(200, {"num_replicas_before": 1, "num_replicas": body["num_replicas"]})

    def do_GET(self) -> None:
        self.answer(200, {"num_replicas": 3, "num_replicas_ready": type(self).num_ready})
        type(self).num_ready += 1

    def answer(self, status: int, body: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked, Handler.num_ready = [], 1
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(*arguments: str) -> str:
    return CliRunner().invoke(scale, arguments, catch_exceptions=False).output


def test_it_waits_until_all_are_ready(url):
    output = run("5", "--url", url, "--api-key", "secret", "--model", "olmoe")
    assert Handler.asked == [("Bearer secret", {"num_replicas": 5, "model": "olmoe"})]
    assert output.startswith("1 -> 5 replicas\n")
    assert "1 of 3 ready\r2 of 3 ready\r3 of 3 ready\n" in output  # two were removed meanwhile


def test_a_refusal_and_a_server_that_is_not_there_are_errors(url):
    with pytest.raises(ConfigError, match="the number of engines on one machine is fixed"):
        run("7", "--url", url)
    with pytest.raises(EngineError, match=r"no server of moeflow answers at http://127\.0\.0\.1:9"):
        run("3", "--url", "http://127.0.0.1:9")
