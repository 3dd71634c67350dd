"""Claim: a second request of an agent with 30 tools of MCP servers gets its first token within 50 ms.

Starts `moeflow serve` and asks with the tools of `tests/data/mcp_tools.json`: free to call (`auto`), made to call
(`required`) and with strict tools. The first request of a round has a prompt and a grammar that are new, the second is
the same again. A bare prompt of as many random tokens shows how much of a first request is prefill. Then a stream runs
beside new schemas, and beside none.

    python -m studies.agent_tools [MODEL] --out results.jsonl
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    COMPLETIONS,
    TOKENIZE,
    Client,
    Phase,
    figures_ms,
    stream,
)
from tests.mcp_tools import chat_tools

UNHELD = ("uniqueItems",)  # keywords that cannot be enforced: tools with one are left out
MAX_TOKENS = 2  # of an answer
MODES = ("auto", "required", "strict")


def tools(count: int) -> list[dict[str, Any]]:
    """Return so many tools as chat completions take them."""
    found = [tool for tool in chat_tools() if not any(word in json.dumps(tool) for word in UNHELD)]
    if count > len(found):
        raise click.ClickException(f"there are {len(found)} tools: ask for fewer than {count}")
    return found[:count]


def request(mode: str, offered: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """Return a request whose prompt and grammar no other number has."""
    numbered = [{**one, "function": {**one["function"], "strict": mode == "strict"}} for one in offered]
    numbered[0]["function"]["name"] += f"_{number}"
    messages = [
        {"role": "system", "content": f"Session {number}: help with the user's files."},
        {"role": "user", "content": "Which files are there?"},
    ]
    choice = "required" if mode == "required" else "auto"
    return {"messages": messages, "tools": numbered, "tool_choice": choice}


def first_token(address: str, path: str, fields: dict[str, Any]) -> tuple[float, float, dict[str, Any]]:
    """Return the seconds to the first byte and to the first token of a streamed answer, and its usage."""
    body = {**fields, "max_tokens": MAX_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    client = Client(address)
    try:
        begun = time.monotonic()
        response = client.post(path, json.dumps(body).encode())
        if response.status != 200:
            raise click.ClickException(f"{path} answers {response.status}: {response.read(300).decode()}")
        byte_s = time.monotonic() - begun
        token_s: float | None = None
        usage: dict[str, Any] = {}
        for event in _events(response):
            if token_s is None and any(map(_says_something, event["choices"])):
                token_s = time.monotonic() - begun
            usage = event.get("usage") or usage
    finally:
        client.close()
    if token_s is None:
        raise click.ClickException(f"{path} brings no token")
    return byte_s, token_s, usage


def _says_something(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {"content": choice.get("text")}
    return bool(delta.get("content") or delta.get("tool_calls") or choice.get("finish_reason"))


def _events(response: Any) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise click.ClickException(f"the answer fails: {event['error']}")
            yield event


def measure_mode(address: str, mode: str, offered: list[dict[str, Any]], numbers: Iterator[int], rounds: int) -> Record:
    """Return the times of one way to offer tools."""
    times: dict[str, list[float]] = {"cold_byte": [], "cold_token": [], "warm_byte": [], "warm_token": []}
    num_tokens = num_cached = 0
    for number in itertools.islice(numbers, rounds):
        asked = request(mode, offered, number)
        for kind in ("cold", "warm"):
            byte_s, token_s, usage = first_token(address, CHAT, asked)
            times[f"{kind}_byte"].append(byte_s)
            times[f"{kind}_token"].append(token_s)
        num_tokens, num_cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    return {"mode": mode, "prompt_tokens": num_tokens, "cached_tokens": num_cached, **_medians_ms(times)}


def measure_bare(address: str, offered: list[dict[str, Any]], num_tokens: int, rounds: int) -> Record:
    """Return the times of prompts of random tokens of the tools, as long as those with tools."""
    times: dict[str, list[float]] = {"cold_byte": [], "cold_token": [], "warm_byte": [], "warm_token": []}
    rng, known = random.Random(0), _tokens(address, json.dumps(offered))
    for _ in range(rounds):
        prompt = {"prompt": rng.choices(known, k=num_tokens), "ignore_eos": True}
        for kind in ("cold", "warm"):
            byte_s, token_s, usage = first_token(address, COMPLETIONS, prompt)
            times[f"{kind}_byte"].append(byte_s)
            times[f"{kind}_token"].append(token_s)
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"mode": "bare prompt", "prompt_tokens": num_tokens, "cached_tokens": num_cached, **_medians_ms(times)}


def _tokens(address: str, text: str) -> list[int]:
    client = Client(address)
    try:
        found: list[int] = json.loads(client.post(TOKENIZE, json.dumps({"prompt": text}).encode()).read())["tokens"]
        return found
    finally:
        client.close()


def _medians_ms(times: dict[str, list[float]]) -> dict[str, float]:
    return {f"{name}_ms": round(1000 * statistics.median(values), 1) for name, values in times.items()}


def measure_stalls(address: str, offered: list[dict[str, Any]], seconds: float) -> list[Record]:
    """Return the gaps between the tokens of a stream, beside nothing and beside answers with new schemas."""
    schemas = [one["function"]["parameters"] for one in offered]
    found = []
    for name in ("nothing", "new schemas"):
        phase = Phase(name)
        until = time.monotonic() + seconds
        streaming = threading.Thread(target=stream, args=(address, phase, until))
        streaming.start()
        for number, schema in enumerate(itertools.cycle(schemas)):
            if time.monotonic() >= until:
                break
            if name == "nothing":
                time.sleep(0.1)
            else:
                _ask_form(address, {**schema, "title": f"Form {number}"}, phase)
        streaming.join()
        problems = sorted(set(phase.problems))
        found.append(
            {"name": name, "gap_ms": figures_ms(phase.gaps_s), "answers": dict(phase.answers), "problems": problems}
        )
    return found


def _ask_form(address: str, schema: dict[str, Any], phase: Phase) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 1, "response_format": form}
    client = Client(address)
    try:
        response = client.post(CHAT, json.dumps(body).encode())
        response.read()
        phase.answers[str(response.status)] += 1
    finally:
        client.close()


def table(record: Record) -> Table:
    """Return the figures for people."""
    bare = next(mode for mode in record["modes"] if mode["mode"] == "bare prompt")
    rows = [
        (
            mode["mode"],
            f"{mode['prompt_tokens']:,}",
            *(f"{mode[name]:,.0f}" for name in ("cold_byte_ms", "cold_token_ms")),
            f"{mode['cold_token_ms'] - bare['cold_token_ms']:+,.0f}",
            *(f"{mode[name]:,.0f}" for name in ("warm_byte_ms", "warm_token_ms")),
        )
        for mode in record["modes"]
    ]
    rows += [
        (
            f"a stream beside {stall['name']}",
            "",
            "",
            "",
            "",
            "",
            f"gap {stall['gap_ms']['p50']:.0f}, at most {stall['gap_ms']['max']:.0f}",
        )
        for stall in record["stalls"]
    ]
    columns = (
        "tool choice",
        "prompt tokens",
        "cold: first byte ms",
        "first token ms",
        "beyond prefill ms",
        "warm: first byte ms",
        "first token ms",
    )
    return Table(
        f"{record['num_tools']} tools of MCP servers; median of {record['rounds']} rounds", columns, tuple(rows)
    )


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--tools", "num_tools", type=click.IntRange(1), default=30, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seconds", type=click.FloatRange(1.0), default=15.0, show_default=True, help="For each stream.")
@result_options
def main(model: str | None, num_tools: int, rounds: int, seconds: float, as_json: bool, out: Path | None) -> None:
    """Measure and print."""
    offered, numbers = tools(num_tools), itertools.count()
    with serving(model, "--log-level", "warning") as server:
        first_token(server.url, CHAT, {"messages": [{"role": "user", "content": "Hello."}]})
        modes = [measure_mode(server.url, mode, offered, numbers, rounds) for mode in MODES]
        modes.append(measure_bare(server.url, offered, modes[0]["prompt_tokens"], rounds))
        stalls = measure_stalls(server.url, offered, seconds)
    publish(
        "agent_tools",
        table,
        out,
        as_json=as_json,
        model=short_name(model),
        num_tools=num_tools,
        rounds=rounds,
        seconds=seconds,
        modes=modes,
        stalls=stalls,
    )


if __name__ == "__main__":
    run_study(main)
