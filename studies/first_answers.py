"""Claim: a first question to the built-in model, with nothing set, gets the right answer in 23 of 24 tries everywhere.

Asks the same question many times through each interface with default settings: the HTTP APIs of `moeflow serve`, `LLM`,
`moeflow generate --chat` and `moeflow chat`. Prints how many answers hold the word, and the first that does not.

    python -m studies.first_answers [MODEL]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import click
import httpx

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.cli.chaos.deployment import serving
from moeflow.llm import LLM
from studies.harness.command import run_study

MOEFLOW = [sys.executable, "-m", "moeflow.cli.main"]
MAX_TOKENS = 64  # of an answer, where the API has no limit of its own
PATIENCE_S = 300.0


def over_http(address: str, question: str, times: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the answers of each conversation API."""
    messages = [{"role": "user", "content": question}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": MAX_TOKENS},
        "/v1/responses": {"input": question, "max_output_tokens": MAX_TOKENS},
        "/v1/messages": {"messages": messages, "max_tokens": MAX_TOKENS},
    }
    with httpx.Client(base_url=address, timeout=PATIENCE_S) as client, ThreadPoolExecutor(4) as threads:
        for path, body in bodies.items():
            yield path, list(threads.map(lambda _, path=path, body=body: _said(client, path, body), range(times)))


def _said(client: httpx.Client, path: str, body: dict[str, object]) -> str:
    """Return the text of an answer, which each API puts elsewhere."""
    answer = client.post(path, json=body).raise_for_status().json()
    match path:
        case "/v1/chat/completions":
            return str(answer["choices"][0]["message"]["content"])
        case "/v1/responses":
            return "".join(part["text"] for item in answer["output"] for part in item["content"])
        case _:
            return "".join(block["text"] for block in answer["content"])


def in_process(model: str | None, question: str, times: int) -> list[str]:
    """Return answers of `LLM.chat` without sampling parameters."""
    conversation = [{"role": "user", "content": question}]
    with LLM(model) as llm:
        return [result.outputs[0].text for result in llm.chat([conversation] * times, progress=False)]


def of_verb(*arguments: str, said: str | None = None) -> str:
    """Return what a verb prints."""
    return subprocess.run([*MOEFLOW, *arguments], input=said, stdout=subprocess.PIPE, text=True, check=True).stdout


def answers(model: str | None, question: str, times: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each interface with its answers."""
    with serving(model, "--log-level", "warning") as server:
        yield from over_http(server.url, question, times)
        yield "moeflow chat --url", [of_verb("chat", "--url", server.url, said=question) for _ in range(times)]
    named = [model] if model else []
    yield "LLM.chat", in_process(model, question, times)
    asked = [of_verb("generate", *named, "--chat", "-p", question) for _ in range(times)]
    yield "moeflow generate --chat", asked
    yield "moeflow chat", [of_verb("chat", *named, said=question) for _ in range(times)]


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--question", default="What is the capital of France?", show_default=True)
@click.option("--word", default="Paris", show_default=True, help="That a right answer holds.")
@click.option("--times", default=24, show_default=True, type=click.IntRange(1))
def main(model: str | None, question: str, word: str, times: int) -> None:
    """Ask and print."""
    rows = []
    for interface, found in answers(model, question, times):
        others = [text for text in found if word not in text]
        rows.append((interface, f"{len(found) - len(others)} of {times}", others[0].strip() if others else ""))
    show(Table("Right answers", ("", f"{word} in", "first other answer"), tuple(rows), words=(2,)))


if __name__ == "__main__":
    run_study(main)
