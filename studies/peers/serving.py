"""Everyone's server under the traffic of `moeflow bench serve`, one server at a time, with the same limits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moeflow.cli.chaos.deployment import free_port
from moeflow.core.errors import EngineError
from studies.peers.contestants import convert, ours, peer
from studies.peers.environments import LLAMA_SERVER

MAX_MODEL_LEN = 512  # prompt and answer of a request
MAX_NUM_SEQS = 32
READY_S = 600.0
OPTIONS = {"dtype": "--dtype", "packed_weights_file": "--packed-weights"}  # of `moeflow serve`, by setting
EXIT_S = 30.0


@dataclass(frozen=True)
class Server:
    """A command that listens on `port` once the model is loaded."""

    name: str  # as it calls its model, and so what its records say
    command: list[str]
    port: int
    probe: str = "/health"  # answers 200 once the model is loaded

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        """Whether the model is loaded."""
        try:
            with urllib.request.urlopen(f"{self.url}{self.probe}", timeout=5):
                return True
        except (urllib.error.URLError, OSError):  # not listening yet, or still loading
            return False


def our_server(weights: str, folder: Path, threads: int) -> Server:
    """Return `moeflow serve`."""
    mine, port = ours(weights, folder), free_port()
    convert(mine)
    settings = [f"{OPTIONS[name]}={value}" for name, value in mine.wish["settings"].items()]
    command = [sys.executable, "-m", "moeflow.cli.main", "serve", str(mine.model), "--model-name", mine.name]
    command += ["--port", str(port), "--threads", str(threads), "--max-queue", "10000", "--no-prefix-caching"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), *settings]
    return Server(mine.name, command, port, probe="/ready")


def peer_servers(weights: str, folder: Path, threads: int) -> Iterator[Server]:
    """Yield the servers that have the format and are installed."""
    llama, vllm = peer("llama", weights, folder), peer("vllm", weights, folder)
    if llama is not None and LLAMA_SERVER.program(folder).exists():
        port = free_port()
        command = [str(LLAMA_SERVER.program(folder)), "--model", str(llama.model), "--alias", llama.name]
        command += ["--port", str(port), "--threads", str(threads), "--parallel", str(MAX_NUM_SEQS), "--cont-batching"]
        command += ["--ctx-size", str(MAX_NUM_SEQS * MAX_MODEL_LEN), "--no-cache-prompt"]
        yield Server(llama.name, command, port)
    if vllm is not None and vllm.python.exists():
        port = free_port()
        command = [str(vllm.python), "-m", "vllm.entrypoints.openai.api_server"]  # its `vllm` command does not start
        command += ["--model", str(vllm.model), "--for-server-model-name", vllm.name, "--port", str(port)]
        command += ["--dtype", weights, "--enforce-eager", "--no-enable-prefix-caching"]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
        yield Server(vllm.name, command, port)


@contextmanager
def running(server: Server, threads: int, log: Path) -> Iterator[None]:
    """Start the server and wait until it answers; end it afterwards.

    Raises: EngineError if it dies or does not answer within minutes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + READY_S
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"the server of {server.name} does not answer; see {log}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        try:
            process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def send_traffic(server: Server, vocab_size: int, options: Sequence[str]) -> int:
    """Run `moeflow bench serve` against it and return its exit code."""
    command = [sys.executable, "-m", "moeflow.cli.main", "bench", "serve", "--url", server.url]
    return subprocess.run([*command, "--vocab-size", str(vocab_size), *options], check=False).returncode
