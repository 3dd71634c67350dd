"""Claim: an open page costs less than 1% of the speed of decoding, and a closed one nothing.

    python -m studies.page_cost
    python -m studies.page_cost --base ../before/.venv/bin/python --out docs/studies/results/page_cost.jsonl

Servers of the built-in model stream answers alternately. Each is idle while another one streams.

"open": every second, somebody reads the experts of the server and those of each token of the answer. "closed": no
client reads anything. "base": the same, by another Python, whose moeflow is older.

Wants a machine with nothing else to do.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import click
import httpx

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.errors import EngineError
from studies.harness.command import run_study
from studies.harness.interleaved import interleaved
from studies.harness.records import publish

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
READ_S = 1.0  # between two reads of an open page
WARM_UPS = 1  # rounds
LIMIT_S = 120.0
NOT_FOUND = 404


class Server(NamedTuple):
    """A running server."""

    url: str
    is_open: bool  # whether a page reads it


@contextlib.contextmanager
def started(python: str, *, is_open: bool) -> Iterator[Server]:
    """Run a server of the built-in model. Raises: EngineError if it does not start."""
    command = [python, "-m", "moeflow", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EngineError("a server has not started: run `moeflow serve --port 0` to see why")
        yield Server(line.split()[-1], is_open)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def tokens_per_s(server: Server, num_tokens: int) -> float:
    """Return the speed of decoding: of the tokens of one answer after its first."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    times: list[float] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT_S) as response:
        response.raise_for_status()
        with _read(server, response.headers["x-request-id"]):
            events = (line[6:] for line in response.iter_lines() if line.startswith("data: {"))
            times.extend(time.perf_counter() for event in events if json.loads(event)["choices"])
    if len(times) < 0.8 * num_tokens:  # some tokens have no text of their own
        raise EngineError(f"{len(times)} events instead of {num_tokens}")
    return (num_tokens - 1) / (times[-1] - times[0])


@contextlib.contextmanager
def _read(server: Server, request_id: str) -> Iterator[None]:
    """Read as a page does while the block runs, if there is a page. Raises: EngineError if it gets no answer."""
    if not server.is_open:
        yield
        return
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read_until, ended, server.url, request_id)
        try:
            yield
        finally:
            ended.set()
        reading.result()


def _read_until(ended: threading.Event, url: str, request_id: str) -> None:
    paths = ("stats?watch=true", "stats/experts", f"stats/requests/{request_id}", f"stats/requests/{request_id}/tokens")
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        is_ended = False
        while not is_ended:
            for path in paths:
                response = client.get(path)
                if response.is_error and response.status_code != NOT_FOUND:  # before its first pass
                    raise EngineError(f"/{path} answers {response.status_code}: {response.text}")
            is_ended = ended.wait(READ_S)


@click.command(help=__doc__)
@click.option("--tokens", default=200, show_default=True, help="Of each answer.")
@click.option("--rounds", default=6, show_default=True)
@click.option("--base", help="Python of another checkout of moeflow, to compare with.")
@result_options
def main(tokens: int, rounds: int, base: str | None, as_json: bool, out: Path | None) -> None:
    """Compare the speeds of servers."""
    speeds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(started(python, is_open=name == "open"))
            for name, python in (("closed", sys.executable), ("open", sys.executable), ("base", base))
            if python
        }
        for number, name in interleaved(list(servers), WARM_UPS + rounds):
            found = tokens_per_s(servers[name], tokens)
            if number >= WARM_UPS:
                speeds.setdefault(name, []).append(found)
    publish("page_cost", table, out, as_json=as_json, tokens_per_s=speeds, tokens=tokens, rounds=rounds)


def table(record: Record) -> Table:
    """Compare the speeds, round by round."""
    speeds: dict[str, list[float]] = record["tokens_per_s"]
    rows = [(name, *_cells(of_arm, speeds["closed"])) for name, of_arm in speeds.items()]
    note = (
        f"Medians of {record['rounds']} answers of {record['tokens']} tokens, alternately, and of the ratios of each "
        "round, with half the distance of the quartiles. An open page reads every second."
    )
    return Table("Speed of decoding with an open page", ("page", "tokens/s", "against closed"), rows, (note,))


def _cells(found: list[float], closed: list[float]) -> tuple[str, str]:
    ratios = [own / other - 1 for own, other in zip(found, closed, strict=True)]
    return _spread(found, "{:.2f}"), "" if found == closed else _spread(ratios, "{:+.2%}")


def _spread(numbers: list[float], form: str) -> str:
    low, median, high = statistics.quantiles(numbers, n=4)
    return f"{form.format(median)} ± {form.format((high - low) / 2).lstrip('+')}"


if __name__ == "__main__":
    run_study(main)
