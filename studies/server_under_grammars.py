"""Claim: grammars that are slow to compile or to follow delay only their own requests, not streams or other clients.

Starts `moeflow serve`, keeps a few streams running, asks `/health` fifty times a second, and has another client ask for
short answers with a small schema. Attackers send one kind of grammar after another meanwhile, each one a little
different, so that none is known already. The last client has another address than the attackers have.

    python -m studies.server_under_grammars [MODEL] --out results.jsonl
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import click

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.cli.chaos.deployment import serving
from studies.harness.command import run_study
from studies.harness.options import short_name
from studies.harness.records import publish
from studies.server_under_long_prompts import (
    CHAT,
    NUM_PROBES,
    PATIENCE_S,
    Load,
    Phase,
    figures_ms,
    probe,
    processes,
    run_threads,
    stream,
    summary,
)

OTHER_ADDRESS = "127.0.0.2"
AMBIGUOUS = "start: a a a a a a a a a a a a\na: b* c* d*\nb: /[a-z ]/\nc: /[a-z ]/ | b b\nd: /[a-z ]/ | c c | b d\n"
LESS_AMBIGUOUS = "start: a a\na: b* c* d*\nb: /[a-z ]{3}/\nc: /[a-z ]{3}/ | b b\nd: /[a-z ]{3}/ | c c | b d\n"
NUMBER = "NUMBER"
MAX_TOKENS = 64
ATTACKER_PATIENCE_S = 10.0  # for an answer
PAUSE_S = 1.0  # of an attacker between an answer and its next request
NUM_PROCESSES = 2  # of attackers


@dataclass
class GrammarPhase(Phase):
    """What was seen while one attack, or none, was under way."""

    forms_s: list[float] = field(default_factory=list)  # whole answers of another client


def _properties(num_properties: int) -> dict[str, object]:
    properties = {f"property_{NUMBER}_{i}": {"type": "string"} for i in range(num_properties)}
    return {"guided_json": {"type": "object", "properties": properties, "additionalProperties": False}}


def _rules(num_rules: int) -> dict[str, object]:
    rules = [f'r{i} ::= "a{i}" r{i + 1}' for i in range(num_rules)]
    return {"guided_grammar": "\n".join(["root ::= r0", *rules, f'r{num_rules} ::= "z{NUMBER}"'])}


ATTACKS: dict[str, Callable[[], dict[str, object]]] = {  # fields of a request, in which NUMBER becomes a number
    "no grammar": dict,
    "ambiguous grammar": lambda: {"guided_grammar": f"{AMBIGUOUS}// {NUMBER}\n"},
    "ambiguous grammar, below the limits": lambda: {"guided_grammar": f"{LESS_AMBIGUOUS}// {NUMBER}\n"},
    "nested repetitions, below the limits": lambda: {"guided_regex": f"{NUMBER}(a{{250}}){{250}}"},
    "5,000 properties": lambda: _properties(5_000),
    "450 properties, below the limits": lambda: _properties(450),
    "GBNF of 30,000 rules": lambda: _rules(30_000),
}


def attack(address: str, until: float, name: str, first: int, num_attackers: int) -> Counter[str]:
    """Have so many attackers send grammars, numbered from the first one on; return the answers by status."""
    template = body_of({"max_tokens": MAX_TOKENS, **ATTACKS[name]()})

    def send(number: int) -> Counter[str]:
        answers: Counter[str] = Counter()
        while time.monotonic() < until:
            answers[_ask(address, numbered(template, number), ATTACKER_PATIENCE_S)] += 1
            number += num_attackers
            time.sleep(PAUSE_S)
        return answers

    with ThreadPoolExecutor(num_attackers) as attackers:
        return sum(attackers.map(send, range(first, first + num_attackers)), Counter())


def body_of(fields: dict[str, object]) -> bytes:
    """Return the body of a request."""
    return json.dumps({"messages": [{"role": "user", "content": "Go on."}], **fields}).encode()


def numbered(template: bytes, number: int) -> bytes:
    """Return a body that differs from those with other numbers."""
    return template.replace(NUMBER.encode(), str(number).encode())


def _ask(address: str, body: bytes, patience_s: float, source: str = "127.0.0.1") -> str:
    """Return the status of an answer, or the name of an error of its connection."""
    parts = urlsplit(address)
    connection = HTTPConnection(str(parts.hostname), parts.port, timeout=patience_s, source_address=(source, 0))
    try:
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def ask_forms(address: str, phase: GrammarPhase, until: float) -> None:
    """Ask for answers with small schemas, each new, from another address."""
    number = 0
    while time.monotonic() < until:
        schema = {"type": "object", "properties": {f"a{number}": {"type": "boolean"}}, "additionalProperties": False}
        begun = time.monotonic()
        status = _ask(address, body_of({"max_tokens": 8, "guided_json": schema}), PATIENCE_S, OTHER_ADDRESS)
        phase.forms_s.append(time.monotonic() - begun)
        if status != "200":
            phase.problems.append(f"a small schema got {status}")
        number += 1


def run_phase(address: str, name: str | None, load: Load) -> GrammarPhase:
    """Run probes, streams, the other client and perhaps an attack side by side."""
    phase = GrammarPhase(name or "quiet")
    until = time.monotonic() + load.seconds
    shares = [range(place, load.num_attackers, NUM_PROCESSES) for place in range(NUM_PROCESSES)]
    attacks = [
        load.attackers.submit(attack, address, until, name, 1_000_000 * place, len(share))
        for place, share in enumerate(shares)
        if name and share
    ]
    jobs = [(stream, (address, phase, until))] * load.num_streams + [(ask_forms, (address, phase, until))]
    jobs += [(probe, (address, phase, until, number)) for number in range(NUM_PROBES)]
    run_threads(jobs)
    for answers in attacks:
        phase.answers += answers.result()
    return phase


def summary_of(phase: GrammarPhase) -> Record:
    """Return a phase's figures."""
    found = {**summary(phase), "form_ms": figures_ms(phase.forms_s)}
    del found["peak_mib"]
    return found


def table(record: Record) -> Table:
    """Return the figures for people."""
    rows = [
        (
            phase["name"],
            *(f"{phase['health_ms'][name]:.0f}" for name in ("p50", "p99", "max")),
            *(f"{phase['token_gap_ms'][name]:.0f}" for name in ("p50", "p99", "max")),
            *(f"{phase['form_ms'][name]:.0f}" for name in ("p50", "max")),
            ", ".join(f"{count} x {status}" for status, count in phase["answers"].items()),
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
        "other form p50 ms",
        "max",
        "answers to attackers",
    )
    title = f"{record['attackers']} clients send grammars, {record['streams']} streams run beside them"
    return Table(title, columns, tuple(rows))


@click.command()
@click.argument("model", required=False)
@click.option("--attackers", type=click.IntRange(1), default=60, show_default=True)
@click.option("--streams", type=click.IntRange(0), default=2, show_default=True)
@click.option("--seconds", type=click.FloatRange(1.0), default=20.0, show_default=True, help="For each attack.")
@click.option("--attack", "names", type=click.Choice(list(ATTACKS)), multiple=True, help="Run only this attack.")
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
    """Attack a server of MODEL (default: the built-in one) with grammars and measure what others feel."""
    phases = []
    with processes(NUM_PROCESSES) as pool:
        load = Load(attackers, streams, seconds, pool)
        with serving(model) as server:
            first = body_of({"max_tokens": 1, "guided_regex": "a"})  # which starts the processes
            _ask(server.url, first, PATIENCE_S)
            for name in (None, *(names or ATTACKS)):
                phases.append(summary_of(run_phase(server.url, name, load)))
                click.echo(json.dumps(phases[-1]), err=True)
    publish(
        "server_under_grammars",
        table,
        out,
        as_json=as_json,
        model=short_name(model),
        attackers=attackers,
        streams=streams,
        seconds=seconds,
        worst_health_p99_ms=max(phase["health_ms"]["p99"] for phase in phases),
        worst_token_gap_p99_ms=max(phase["token_gap_ms"]["p99"] for phase in phases),
        phases=phases,
    )


if __name__ == "__main__":
    run_study(main)
