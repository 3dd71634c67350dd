"""Drafted tokens, ours and llama.cpp's: the same target, draft and prompts, each beside its own plain decoding.

The target is the built-in model, and its dense source drafts. Both are GGUF files that all engines read. llama.cpp's
own server drafts as it is meant to: with a draft model, or by looking up runs of tokens. One request at a time, greedy;
all engines answer every prompt, alternately. What counts is the time of a token after the first.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflow.cli.chaos.deployment import free_port
from moeflow.core.errors import EngineError
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from studies.peers import model
from studies.peers.drafting_table import ALL_SETS, PLAIN
from studies.peers.environments import LLAMA_SERVER
from studies.peers.serving import Server, running
from studies.speculation.prompts import Prompt
from studies.speculation.run import Answer, SpeculationRun, set_fields

TARGET = "SmolLM2-8x135M-Instruct-{}.gguf"
CONTEXT = 2048
ANSWER_S = 120.0
OURS, THEIRS = "moeflow", "llama.cpp"
# What drafts, and how the server is told so. Its defaults, and what suits short answers: fewer tokens looked up, more
# drafted as long as the draft is sure.
LLAMA_GUESSES: Mapping[str, Sequence[str]] = {
    PLAIN: (),
    "draft model (default: 3 tokens)": ("--spec-type", "draft-simple"),
    "draft model, up to 8 tokens": (
        *("--spec-type", "draft-simple", "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.5"),
    ),
    "lookup, runs of 3": (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
    ),
    "draft model and lookup": (
        *("--spec-type", "draft-simple,ngram-simple", "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.5"),
        *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
    ),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A model and what drafts for it, as GGUF files."""

    target: Path
    draft: Path


def write_target(folder: Path, builtin: Path, draft: Path, quantization: str) -> Path:
    """Write the built-in model as a GGUF file with the tokenizer of its source; one that is there is left alone."""
    file = folder / TARGET.format(quantization)
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        model.write_gguf(builtin, unfinished, model.QUANTIZATIONS[quantization], tokenizer_file=draft)
        unfinished.rename(file)
    return file


def compare(
    pair: Pair,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    rounds: int,
    new_tokens: int,
    threads: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the fields of a record. Raises: EngineError if an engine fails."""
    settings = Settings(
        model=str(pair.target), speculators=("suffix", str(pair.draft)), num_threads=threads, max_num_seqs=1
    )
    with ExitStack() as stack:
        run = stack.enter_context(SpeculationRun(resolve(settings).config, new_tokens=new_tokens, temperature=0.0))
        servers = [
            stack.enter_context(_started(name, options, pair, folder, threads))
            for name, options in LLAMA_GUESSES.items()
        ]
        found: dict[str, list[tuple[list[Answer], list[Answer]]]] = {}
        for number in range(rounds):
            run.begin_round()
            for place, prompt in enumerate(prompts):
                say(f"round {number + 1} of {rounds}, {prompt.name} {place + 1} of {len(prompts)}")
                found.setdefault(prompt.name, []).append(_turn(run, servers, prompt, number + place, new_tokens))
    return {
        "target": pair.target.name,
        "draft": pair.draft.name,
        "new_tokens": new_tokens,
        "num_prompts": len(prompts),
        "rounds": rounds,
        "num_same": sum(ours[0].token_ids == theirs[0].token_ids for pairs in found.values() for ours, theirs in pairs),
        "rows": [
            *_rows(OURS, run.names, {name: [ours for ours, _ in pairs] for name, pairs in found.items()}),
            *_rows(
                THEIRS, list(LLAMA_GUESSES), {name: [theirs for _, theirs in pairs] for name, pairs in found.items()}
            ),
        ],
    }


def _turn(
    run: SpeculationRun, servers: Sequence[Server], prompt: Prompt, first: int, new_tokens: int
) -> tuple[list[Answer], list[Answer]]:
    """Have everybody answer a prompt; who begins takes turns, between engines as within each."""
    ours: list[Answer] = []
    theirs: dict[int, Answer] = {}
    for which in (first % 2, 1 - first % 2):
        if which == 0:
            ours = list(run.answers(prompt, 0, first))
            continue
        for step in range(len(servers)):
            at = (first + step) % len(servers)
            theirs[at] = _ask(servers[at], prompt, new_tokens)
    return ours, [theirs[at] for at in range(len(servers))]


@contextmanager
def _started(name: str, options: Sequence[str], pair: Pair, folder: Path, threads: int) -> Iterator[Server]:
    port = free_port()
    command = [str(LLAMA_SERVER.program(folder)), "--model", str(pair.target), "--port", str(port), *options]
    command += ["--model-draft", str(pair.draft)] if "--spec-type" in options and "draft" in options[1] else []
    command += ["--threads", str(threads), "--parallel", "1", "--ctx-size", str(CONTEXT), "--no-cache-prompt"]
    server = Server(name, command, port)
    log = folder / "logs" / f"speculation-{''.join(char if char.isalnum() else '-' for char in name)}.log"
    with running(server, threads, log):
        yield server


def _ask(server: Server, prompt: Prompt, new_tokens: int) -> Answer:
    """Return a greedy answer of llama.cpp's server. Its clock for tokens starts with the first one."""
    wish = {"prompt": prompt.token_ids, "n_predict": new_tokens, "temperature": 0, "cache_prompt": False}
    body = json.dumps({**wish, "return_tokens": True}).encode()
    request = urllib.request.Request(f"{server.url}/completion", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            answer = json.load(response)
    except OSError as error:
        raise EngineError(f"llama.cpp's server ({server.name}) does not answer: {error}") from error
    timings = answer["timings"]
    num_tokens, drafted = timings["predicted_n"], timings.get("draft_n", 0)
    accepted = timings.get("draft_n_accepted", 0)
    return Answer(
        token_ids=answer["tokens"],
        seconds_per_token=timings["predicted_ms"] / 1000 / max(num_tokens - 1, 1),
        passes=num_tokens - 1 - accepted,
        drafting_passes=0,  # it does not tell
        drafted=drafted,
        accepted=accepted,
    )


def _rows(engine: str, names: Sequence[str], found: Mapping[str, Sequence[Sequence[Answer]]]) -> list[dict[str, Any]]:
    """Return what each way of drafting made of the sets, beside the engine's own plain decoding, its first."""
    every = [answers for of_set in found.values() for answers in of_set]
    rows = []
    for number, name in enumerate(names):
        sets = {**found, ALL_SETS: every}
        fields = [set_fields(key, [(each[0], each[number]) for each in answers]) for key, answers in sets.items()]
        rows.append({"engine": engine, "drafts": name, "sets": fields})
    return rows
