"""How long the second turn of a long conversation takes to its first token, with and without what the first left.

    python -m studies.prompt_cache [MODEL] [--tokens 6000] [--kv-dtype float32] [--repeats 3] [--out FILE]

A first process answers a prompt, with a prompt cache. Then each turn is a process of its own that loads the model,
prints the time of the first token and the answer, all alternately. After a restart there is no prompt cache, one with
files in memory, or one with files on disk. In the loop of an agent, the process has just answered another prompt, or
the first turn. A model with recurrent layers then resumes from its last checkpoint.
Answers must be equal, and so must the log-probabilities of their tokens, to the bit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from moeflow import LLM, SamplingParams
from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.checkpoint.packed.file_io import drop_cached_file
from moeflow.cli.bench.output import result_options
from moeflow.core.cache_dir import cache_folder
from moeflow.core.durable import sync
from moeflow.core.units import GIB, format_bytes, format_seconds
from moeflow.kv.disk.extent import SUFFIX
from moeflow.kv.disk.folder_usage import folder_bytes
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.builtin import ensure_builtin_model
from studies.harness.command import run_study
from studies.harness.options import short_name
from studies.harness.records import publish

COMPUTED, WARM, COLD = "restarted: computed", "restarted: read, files in memory", "restarted: read from disk"
ANEW, KEPT = "goes on: computed", "goes on: kept"
ARMS = (COMPUTED, WARM, COLD, ANEW, KEPT)
FIRST_ID = 100  # of the tokens that prompts have: those before may be special
NUM_NEW = 100  # tokens that the second turn adds to the first answer
NUM_FIRST_ANSWERED, NUM_ANSWERED = 64, 8


def answer(
    settings: dict[str, Any], prompt: list[int], num_tokens: int, prompt_before: list[int] | None = None
) -> dict[str, Any]:
    """Answer a prompt in this process, perhaps after another one, which is answered as first turns are.

    Return the tokens with their log-probabilities, and the seconds to the first one, without loading.
    """
    with closing(LLM(**settings)) as llm:
        if prompt_before is not None:
            llm.generate([prompt_before], _sampling(NUM_FIRST_ANSWERED), progress=False)
        began_s = time.perf_counter()
        (first,) = llm.generate([prompt], _sampling(1), progress=False)
        first_s = time.perf_counter() - began_s
        (result,) = llm.generate([prompt], _sampling(num_tokens), progress=False)
        stats = llm.stats()
    (completion,) = result.outputs
    return {
        "first_token_s": first_s,
        "token_ids": list(completion.token_ids),
        "logprobs": [token.logprob for it in (*first.outputs, completion) for token in it.logprobs or []],
        "cached_tokens": first.num_cached_tokens,
        "read_bytes": stats.prompt_cache_read_bytes_total,
    }


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)


def in_a_process(
    settings: dict[str, Any], prompt: list[int], num_tokens: int, prompt_before: list[int] | None = None
) -> dict[str, Any]:
    """Do so in a new one."""
    asked = json.dumps([settings, prompt, num_tokens, prompt_before])
    done = subprocess.run(
        [sys.executable, "-m", "studies.prompt_cache", "--child"], input=asked, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"the process that answers ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def second_turn(
    arm: str, settings: dict[str, Any], kept: Path, prompt: list[int], prompts_before: dict[str, list[int]]
) -> dict[str, Any]:
    """Answer the second turn in one of the ways: after a prompt, or over a copy of what the first turn has left."""
    if arm in (COMPUTED, *prompts_before):
        return in_a_process(settings, prompt, NUM_ANSWERED, prompts_before.get(arm))
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        copy = Path(folder) / "prompts"
        shutil.copytree(kept, copy, copy_function=os.link)  # files are never changed
        for file in copy.glob(f"*{SUFFIX}"):
            sync(file)
            if arm == COLD:
                drop_cached_file(file)
            else:
                file.read_bytes()
        return in_a_process({**settings, "prompt_cache": str(copy)}, prompt, NUM_ANSWERED)


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--tokens", default=6000, show_default=True, help="Of the first prompt.")
@click.option("--kv-dtype", default="float32", show_default=True)
@click.option("--threads", type=int, help="[default: all cores]")
@click.option("--repeats", default=3, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="On the disk to measure.  [default: a temporary one]")
@result_options
def main(
    model: str | None,
    tokens: int,
    kv_dtype: str,
    threads: int | None,
    repeats: int,
    folder: Path | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure all arms alternately; exit with 1 if answers differ."""
    rng = random.Random(0)
    path = str(model or ensure_builtin_model(cache_folder(None)))
    vocab_size = Tokenizer.load(path).vocab_size
    settings: dict[str, Any] = {"model": path, "kv_dtype": kv_dtype, "num_threads": threads, "max_num_seqs": 1}
    prompt, new, other = ([rng.randrange(FIRST_ID, vocab_size) for _ in range(n)] for n in (tokens, NUM_NEW, tokens))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        kept = Path(place) / "prompts"
        with_cache = {**settings, "prompt_cache": str(kept), "prompt_cache_bytes": 64 * GIB}
        first = in_a_process(with_cache, prompt, NUM_FIRST_ANSWERED)
        turn = [*prompt, *first["token_ids"], *new]
        runs = []
        for _ in range(repeats):
            for arm in ARMS:
                runs.append({"arm": arm, **second_turn(arm, settings, kept, turn, {ANEW: other, KEPT: prompt})})
                click.echo(f"{arm}: {format_seconds(runs[-1]['first_token_s'])}", err=True)
        kept_bytes = folder_bytes(kept)
    answers = {(*run.pop("token_ids"), *run.pop("logprobs")) for run in runs}
    record = publish(
        "prompt_cache",
        table,
        out,
        as_json=as_json,
        threads=threads,
        model=short_name(model),
        kv_dtype=kv_dtype,
        prompt_tokens=len(turn),
        first_turn_s=first["first_token_s"],
        kept_bytes=kept_bytes,
        are_equal=len(answers) == 1,
        runs=runs,
    )
    if not record["are_equal"]:
        raise SystemExit("answers differ")


def table(record: Record) -> Table:
    """Return the times to the first token."""
    rows = []
    for arm in ARMS:
        runs = [run for run in record["runs"] if run["arm"] == arm]
        times = [run["first_token_s"] for run in runs]
        rows.append(
            (
                arm,
                format_seconds(statistics.median(times)),
                f"{format_seconds(min(times))} to {format_seconds(max(times))}",
                f"{runs[0]['cached_tokens']}",
                format_bytes(runs[0]["read_bytes"]),
            )
        )
    title = f"Second turn: {record['model']}, {record['prompt_tokens']} tokens, {record['kv_dtype']} K and V"
    note = f"The first turn took {format_seconds(record['first_turn_s'])} to its first token."
    return Table(
        title, ("keys and values", "first token", "range", "tokens cached", "bytes read"), tuple(rows), (note,)
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        print(json.dumps(answer(*json.loads(sys.stdin.read()))))
    else:
        run_study(main)
