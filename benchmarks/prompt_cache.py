"""How long the second turn of a long conversation takes to its first token after a restart, with and without a cache.

    python benchmarks/prompt_cache.py [MODEL] [--tokens 6000] [--kv-dtype float32] [--repeats 3] [--out FILE]

A first process answers a prompt, with a prompt cache. Then each turn is a process of its own that loads the model,
says when it has the first token, and what the answer is: without a cache, with one whose files the system has in
memory, and with one whose files it has to read from disk, all in turns. Answers must be equal.
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
from moeflow.bench.records import Record, make_record
from moeflow.bench.tables import Table
from moeflow.checkpoint.packed.file_io import drop_cached_file
from moeflow.cli.bench.output import keep, result_options, show
from moeflow.core.durable import sync
from moeflow.core.units import GIB, format_bytes, format_seconds
from moeflow.kv.disk.extent import SUFFIX
from moeflow.kv.disk.folder_usage import folder_bytes

COMPUTED, WARM, COLD = "computed", "read, files in memory", "read from disk"
ARMS = (COMPUTED, WARM, COLD)
NUM_NEW = 100  # tokens that the second turn adds to the first answer
NUM_ANSWERED = 8


def answer(settings: dict[str, Any], prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Answer a prompt in this process; return the tokens, and the seconds to the first one, without loading."""
    with closing(LLM(**settings)) as llm:
        began_s = time.perf_counter()
        llm.generate([prompt], _sampling(1), progress=False)
        first_s = time.perf_counter() - began_s
        (result,) = llm.generate([prompt], _sampling(num_tokens), progress=False)
        stats = llm.stats()
    return {
        "first_token_s": first_s,
        "token_ids": list(result.outputs[0].token_ids),
        "read_tokens": stats.prompt_cache_hit_tokens_total,
        "read_bytes": stats.prompt_cache_read_bytes_total,
    }


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def in_a_process(settings: dict[str, Any], prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Do so in a new one."""
    asked = json.dumps([settings, prompt, num_tokens])
    done = subprocess.run([sys.executable, __file__, "--child"], input=asked, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the process that answers ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def second_turn(arm: str, settings: dict[str, Any], kept: Path, prompt: list[int]) -> dict[str, Any]:
    """Answer the second turn in one of the ways, over a copy of what the first has left."""
    if arm == COMPUTED:
        return in_a_process(settings, prompt, NUM_ANSWERED)
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
    """Measure all arms in turns; exit with 1 if answers differ."""
    rng = random.Random(0)
    settings: dict[str, Any] = {"model": model, "kv_dtype": kv_dtype, "num_threads": threads, "max_num_seqs": 1}
    prompt, new = ([rng.randrange(100, 30000) for _ in range(number)] for number in (tokens, NUM_NEW))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        kept = Path(place) / "prompts"
        first = in_a_process({**settings, "prompt_cache": str(kept), "prompt_cache_bytes": 64 * GIB}, prompt, 64)
        turn = [*prompt, *first["token_ids"], *new]
        runs = []
        for _ in range(repeats):
            for arm in ARMS:
                runs.append({"arm": arm, **second_turn(arm, settings, kept, turn)})
                click.echo(f"{arm}: {format_seconds(runs[-1]['first_token_s'])}", err=True)
        kept_bytes = folder_bytes(kept)
    answers = {tuple(run.pop("token_ids")) for run in runs}
    record = make_record(
        "prompt_cache",
        ["python", "benchmarks/prompt_cache.py", *sys.argv[1:]],
        seed=0,
        threads=threads,
        model=Path(model).name if model else "built-in",
        kv_dtype=kv_dtype,
        prompt_tokens=len(turn),
        first_turn_s=first["first_token_s"],
        kept_bytes=kept_bytes,
        are_equal=len(answers) == 1,
        runs=runs,
    )
    keep(record, out, as_json=as_json)
    if not as_json:
        show(table(record))
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
                f"{runs[0]['read_tokens']}",
                format_bytes(runs[0]["read_bytes"]),
            )
        )
    title = (
        f"Second turn after restart: {record['model']}, {record['prompt_tokens']} tokens, {record['kv_dtype']} K and V"
    )
    note = f"The first turn took {format_seconds(record['first_turn_s'])} to its first token."
    return Table(title, ("keys and values", "first token", "range", "tokens read", "bytes read"), tuple(rows), (note,))


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        print(json.dumps(answer(*json.loads(sys.stdin.read()))))
    else:
        main()
