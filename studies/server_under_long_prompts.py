"""Claim: clients that send long prompts do not freeze the others: `/health` answers within 100 ms in 99 of 100 cases.

Starts `moeflow serve`, keeps a few streams running, asks `/health` fifty times a second, and has several clients
send one kind of large body after another, each as large as the server takes. Two more attacks send little: requests
that follow a long conversation of stored responses, and connections that send nothing. Latencies count from a probe's
due time, not from its sending. So a freeze of seconds is not one bad sample among many good ones. Probes
take turns on several connections, so none waits for the answer to an earlier one. Attackers have processes of their
own, so probes measure the delay of the server alone.

    python -m studies.server_under_long_prompts [MODEL] --out results.jsonl
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import click
import psutil

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.cli.chaos.deployment import serving
from studies.harness.command import run_study
from studies.harness.options import short_name
from studies.harness.records import publish

PROBE_S = 0.02
NUM_PROBES = 5  # connections that take turns
BODY_BYTES = 4 * 2**20 - 4096  # just below the server's default limit
CHAT, COMPLETIONS, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"
NUM_ITEMS = 2600  # empty items of a stored response; two such responses are nearly as many as the server reads
NUM_SILENT = 240  # connections of a wave of one attacker
WAVE_S = 1.0
PATIENCE_S = 300.0  # for an answer
SENTENCE = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class Attack:
    """One kind of large request, again and again."""

    name: str
    path: str
    body: bytes

    def run(self, address: str, until: float) -> Counter[str]:
        """Send it; return the answer."""
        answers: Counter[str] = Counter()
        while time.monotonic() < until:
            answers[_send(address, self.path, self.body)[0]] += 1
        return answers


@dataclass(frozen=True)
class ChainAttack:
    """Small requests that follow a conversation of stored responses, as long as the server reads one."""

    name: str

    def run(self, address: str, until: float) -> Counter[str]:
        """Store the conversation, then send requests; return the answer."""
        answers: Counter[str] = Counter()
        previous_id: str | None = None
        for size in (NUM_ITEMS, NUM_ITEMS, 0):
            items = [{"type": "reasoning", "summary": []}] * size
            while time.monotonic() < until:
                body = {"max_output_tokens": 1, "input": [*items, {"role": "user", "content": "Hi."}]}
                status, answer = _send(
                    address, RESPONSES, json.dumps(body | {"previous_response_id": previous_id}).encode()
                )
                answers[status] += 1
                if size:
                    previous_id = json.loads(answer).get("id", previous_id)
                    break
        return answers


@dataclass(frozen=True)
class SilentAttack:
    """Connections that send nothing, in waves."""

    name: str

    def run(self, address: str, until: float) -> Counter[str]:
        """Open them; return how many were open at the end of their wave, and how many were closed."""
        answers: Counter[str] = Counter()
        parts = urlsplit(address)
        while time.monotonic() < until:
            with contextlib.ExitStack() as opened:
                wave = []
                for _ in range(NUM_SILENT):
                    connection = opened.enter_context(socket.socket())
                    connection.settimeout(PATIENCE_S)
                    connection.connect((parts.hostname, parts.port))
                    wave.append(connection)
                time.sleep(WAVE_S)
                answers.update("closed" if _is_closed(connection) else "open" for connection in wave)
        return answers


@dataclass
class Phase:
    """What was seen while one attack, or none, was under way."""

    name: str
    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between the events of a stream
    answers: Counter[str] = field(default_factory=Counter)  # to the attackers, by status
    peak_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def _is_closed(connection: socket.socket) -> bool:
    try:
        connection.setblocking(False)
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send(address: str, path: str, body: bytes) -> tuple[str, bytes]:
    """Send a request on a connection of its own; return what became of it, and the answer."""
    client = Client(address)
    try:
        response = client.post(path, body)
        return str(response.status), response.read()
    except OSError as error:  # refused before the whole body was sent
        return type(error).__name__, b"{}"
    finally:
        client.close()


AnyAttack = Attack | ChainAttack | SilentAttack


def attacks() -> list[AnyAttack]:
    """Return the large requests: what a model could be given, and what it never could."""
    text = SENTENCE * (BODY_BYTES // len(SENTENCE))
    short = {"role": "user", "content": "a"}
    chat = json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": text}]})
    turns = json.dumps({"max_tokens": 1, "messages": [short] * (BODY_BYTES // len(json.dumps(short) + ", "))})
    ids = "[" + ",".join(["7"] * (BODY_BYTES // 2)) + "]"
    lists = "[" + ",".join(["[]"] * (BODY_BYTES // 3)) + "]"
    return [
        Attack("text", COMPLETIONS, json.dumps({"max_tokens": 1, "prompt": text}).encode()),
        Attack("chat", CHAT, chat.encode()),
        Attack("many messages", CHAT, turns.encode()),
        Attack("token ids", COMPLETIONS, f'{{"max_tokens": 1, "prompt": {ids}}}'.encode()),
        Attack("empty lists", COMPLETIONS, f'{{"max_tokens": 1, "prompt": {lists}}}'.encode()),
        Attack("tokenize", TOKENIZE, json.dumps({"prompt": text}).encode()),
        ChainAttack("stored responses"),
        SilentAttack("silent connections"),
    ]


class Client:
    """One connection at a time to the server."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=PATIENCE_S)

    def get(self, path: str) -> int:
        """Ask, and return the status."""
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        response.read()
        return response.status

    def post(self, path: str, body: bytes) -> http.client.HTTPResponse:
        """Send JSON and return the answer, not yet read."""
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        return self._connection.getresponse()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def probe(address: str, phase: Phase, until: float, number: int) -> None:
    """Ask for /health at fixed times and keep how late each answer was; `number` is whose turn it is."""
    client = Client(address)
    due = time.monotonic() + number * PROBE_S
    while due < until:
        time.sleep(max(0.0, due - time.monotonic()))
        status = client.get("/health")
        phase.health_s.append(time.monotonic() - due)
        if status != 200:
            phase.problems.append(f"/health said {status}")
        due += NUM_PROBES * PROBE_S
    client.close()


def stream(address: str, phase: Phase, until: float) -> None:
    """Read answers event by event and keep the time between them."""
    body = {"messages": [{"role": "user", "content": "Count from 1 to 1000."}], "stream": True, "ignore_eos": True}
    while time.monotonic() < until:
        client = Client(address)
        response = client.post(CHAT, json.dumps({**body, "max_tokens": 400}).encode())
        before: float | None = None
        while time.monotonic() < until and (line := response.readline()):
            if not line.startswith(b"data: {"):
                continue
            if b'"error"' in line[:20]:
                phase.problems.append(f"a stream failed: {line[:200]!r}")
            now = time.monotonic()
            if before is not None:
                phase.gaps_s.append(now - before)
            before = now
        client.close()


def watch_memory(process: psutil.Process, phase: Phase, until: float) -> None:
    """Keep the most memory that the process that speaks HTTP held."""
    while time.monotonic() < until:
        phase.peak_bytes = max(phase.peak_bytes, process.memory_info().rss)
        time.sleep(PROBE_S)


@dataclass(frozen=True)
class Load:
    """Who takes part, and for how long."""

    num_attackers: int
    num_streams: int
    seconds: float
    attackers: ProcessPoolExecutor


def run_threads(jobs: Sequence[tuple[Callable[..., None], tuple[object, ...]]]) -> None:
    """Call each function with its arguments, all at once. Blocks: until the last one returns."""
    threads = [threading.Thread(target=target, args=args) for target, args in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_phase(address: str, process: psutil.Process, kind: AnyAttack | None, load: Load) -> Phase:
    """Run probes, streams and perhaps an attack side by side."""
    phase = Phase(kind.name if kind else "quiet")
    until = time.monotonic() + load.seconds
    attacks = [load.attackers.submit(kind.run, address, until) for _ in range(load.num_attackers)] if kind else []
    jobs = [(watch_memory, (process, phase, until)), *[(stream, (address, phase, until))] * load.num_streams]
    jobs += [(probe, (address, phase, until, number)) for number in range(NUM_PROBES)]
    run_threads(jobs)
    for answers in attacks:
        phase.answers += answers.result()
    return phase


@contextlib.contextmanager
def processes(number: int) -> Iterator[ProcessPoolExecutor]:
    """Yield so many processes, which have started."""
    with ProcessPoolExecutor(number, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time.sleep, [1.0] * number))
        yield pool


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile in milliseconds; 0 of nothing."""
    ordered = sorted(values)
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000, 2) if ordered else 0.0


def figures_ms(values_s: Sequence[float]) -> Record:
    """Return the figures of some times."""
    return {
        "count": len(values_s),
        "p50": quantile(values_s, 0.5),
        "p99": quantile(values_s, 0.99),
        "max": quantile(values_s, 1),
    }


def summary(phase: Phase) -> Record:
    """Return a phase's figures."""
    return {
        "name": phase.name,
        "health_ms": figures_ms(phase.health_s),
        "token_gap_ms": figures_ms(phase.gaps_s),
        "answers": dict(phase.answers),
        "peak_mib": phase.peak_bytes // 2**20,
        "problems": sorted(set(phase.problems)),
    }


def table(record: Record) -> Table:
    """Return the figures for people."""
    rows = [
        (
            phase["name"],
            *(f"{phase[kind][name]:.0f}" for kind in ("health_ms", "token_gap_ms") for name in ("p50", "p99", "max")),
            ", ".join(f"{count} x {status}" for status, count in phase["answers"].items()),
            str(phase["peak_mib"]),
        )
        for phase in record["phases"]
    ]
    columns = (
        "attack",
        "/health p50 ms",
        "p99",
        "max",
        "token gap p50 ms",
        "p99",
        "max",
        "answers to attackers",
        "peak MiB",
    )
    title = f"{record['attackers']} clients attack, {record['streams']} streams run meanwhile"
    return Table(title, columns, tuple(rows))


@click.command()
@click.argument("model", required=False)
@click.option("--attackers", type=click.IntRange(1), default=5, show_default=True)
@click.option("--streams", type=click.IntRange(0), default=2, show_default=True)
@click.option("--seconds", type=click.FloatRange(1.0), default=10.0, show_default=True, help="For each attack.")
@click.option("--attack", "names", multiple=True, help="Run only this attack; may be given several times.")
@result_options
def main(
    model: str | None,
    attackers: int,
    streams: int,
    seconds: float,
    names: tuple[str, ...],
    as_json: bool,
    out: Path | None,
) -> None:
    """Attack a server of MODEL (default: the built-in one) and measure what others feel."""
    chosen = [kind for kind in attacks() if not names or kind.name in names]
    phases = []
    with processes(attackers) as pool:
        load = Load(attackers, streams, seconds, pool)
        for kind in (None, *chosen):
            with serving(model) as server:  # a fresh one, so that peaks of memory are the attack's own
                phase = run_phase(server.url, server.process, kind, load)
            phases.append(summary(phase))
            click.echo(json.dumps(phases[-1]), err=True)
    publish(
        "server_under_long_prompts",
        table,
        out,
        as_json=as_json,
        model=short_name(model),
        attackers=attackers,
        streams=streams,
        seconds=seconds,
        body_bytes=BODY_BYTES,
        worst_health_p99_ms=max(phase["health_ms"]["p99"] for phase in phases),
        median_token_gap_ms=statistics.median(phase["token_gap_ms"]["p50"] for phase in phases),
        phases=phases,
    )


if __name__ == "__main__":
    run_study(main)
