"""A whole server in a process of its own, as its users start it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.live_server import complaints, eventually

START = """
import sys
from pathlib import Path
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.server.config import ServerConfig
from moeflow.server.launch import serve
from moeflow.server.logs import start_logs
start_logs("info", "text")
folder = sys.argv[1]
settings = Settings(model=folder, num_threads=1, kv_cache_bytes=2**24, cache_dir=Path(folder), is_served=True)
sys.exit(serve(
    lambda: resolve(settings).plan,
    ServerConfig(
        port=int(sys.argv[2]), shutdown_deadline_s=float(sys.argv[3]), max_engine_restarts=int(sys.argv[4]),
        grpc_port=0 if sys.argv[5] == "grpc" else None,
    ),
))
"""
LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "temperature": 0, "ignore_eos": True}  # takes a second


class Server:
    """One server process."""

    def __init__(
        self, model: Path, *, port: int = 0, deadline_s: float = 30.0, max_restarts: int = 9, grpc: bool = False
    ) -> None:
        command = [
            sys.executable,
            "-c",
            START,
            str(model),
            str(port),
            str(deadline_s),
            str(max_restarts),
            "grpc" * grpc,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = ""
        self.grpc_address: str | None = None
        self.num_begun = 0

    def wait_until_ready(self) -> Server:
        line = self.process.stdout.readline()
        match = re.fullmatch(r"moeflow serves .+ at (http://127\.0\.0\.1:\d+)(?: and by gRPC at (\S+))?\n", line)
        if match is None:
            self.process.kill()  # or its stderr would have no end
            pytest.fail(f"{line!r}, {self.process.stderr.read()}")
        self.url, self.grpc_address = match.groups()
        return self

    def engine(self) -> psutil.Process:
        (engine,) = self.engines()
        return engine

    def engines(self) -> list[psutil.Process]:
        """Return the processes of engines; another renders chat templates."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "moeflow.processes.main" in child.cmdline()]

    def post(self, **changes) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=LONG | changes, timeout=60)

    def in_background(self, **changes) -> tuple[threading.Thread, list[httpx.Response]]:
        """Send a request and return once the engine works on it."""
        responses: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: responses.append(self.post(**changes)))
        self.num_begun += changes.get("n", 1)
        thread.start()
        assert eventually(self._has_begun, 10)
        return thread, responses

    def _has_begun(self) -> bool:
        stats = httpx.get(f"{self.url}/stats").json()
        return stats["num_unfinished"] == self.num_begun and stats["num_running"] > 0

    def status(self, path: str) -> int:
        return httpx.get(self.url + path, timeout=10).status_code

    def said(self) -> str:
        """Return all of stderr without the expected speed, as it was not measured here."""
        return complaints(self.process.stderr.read())

    def end(self, timeout_s: float = 30) -> int:
        return self.process.wait(timeout_s)
