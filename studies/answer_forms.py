"""What holding answers to a form costs: decode steps with a schema and without, of the same model, alternately.

    python -m studies.answer_forms [--model FOLDER] [--batch 1 --batch 8] [--tokens 64] [--rounds 9] [--out FILE]

A step's time is that of a long answer without that of its first token, which compiles the schema. Figures need a quiet
machine.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from moeflow import LLM, SamplingParams
from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from moeflow.cli.bench.output import result_options
from moeflow.planner.hardware.host import host_resources
from moeflow.text.answer_form.answer_grammar import plain_grammar
from moeflow.text.answer_form.form import JsonForm
from studies.harness.command import run_study
from studies.harness.interleaved import measure_interleaved
from studies.harness.records import publish

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b"]}, "size": {"type": "number"}},
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
FORM = plain_grammar(JsonForm({"type": "array", "items": ITEM, "minItems": 1000}))  # longer than any answer here


def step_s(llm: LLM, batch: int, num_tokens: int, grammar: str) -> float:
    """Return the seconds of one decode step; each row has a seed, and so an answer, of its own."""
    times = []
    for count in (1, num_tokens):
        params = [
            SamplingParams(max_tokens=count, ignore_eos=True, temperature=1.0, seed=row, grammar=grammar)
            for row in range(batch)
        ]
        start = time.perf_counter()
        llm.generate([[1, 5, 7]] * batch, params, progress=False)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / (num_tokens - 1)


def measure(llm: LLM, batch: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Return the steps of one batch size, in seconds, alternately with and without a schema; a first round warms up."""
    arms = {name: partial(step_s, llm, batch, num_tokens, form) for name, form in (("plain_s", ""), ("formed_s", FORM))}
    return {"batch_size": batch, **measure_interleaved(arms, rounds)}


@click.command(help=__doc__)
@click.option("--model", help="[default: the built-in model]")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 8), show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Of an answer.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@result_options
def main(
    model: str | None, batches: tuple[int, ...], tokens: int, rounds: int, as_json: bool, out: Path | None
) -> None:
    """Measure, print and keep."""
    threads = host_resources().num_cores
    settings = {"max_num_seqs": max(batches), "num_threads": threads, "generation_config": "none"}
    with LLM(model, **settings) as llm:
        rows = [measure(llm, batch, tokens, rounds) for batch in batches]
        measured = llm.model
    publish(
        "answer_forms",
        table,
        out,
        as_json=as_json,
        threads=threads,
        model=measured.name,
        weight_format=measured.weight_format,
        vocab_size=measured.vocab_size,
        num_tokens=tokens,
        rows=rows,
    )


def table(record: Record) -> Table:
    """Compare steps with and without a schema."""
    rows = []
    for row in record["rows"]:
        plain, formed = ([value * 1e3 for value in row[name]] for name in ("plain_s", "formed_s"))
        ratios = [one / other for one, other in zip(formed, plain, strict=True)]
        rows.append((f"batch {row['batch_size']}", *(spread_text(it, 2) for it in (plain, formed, ratios))))
    title = f"A decode step, ms: median (min-max): {record['model']}, {record['weight_format']}"
    notes = (
        f"In turns, over answers of {record['num_tokens']} tokens at temperature 1 from a vocabulary of "
        f"{record['vocab_size']:,}. Answers in JSON have other tokens, and with these other experts are read.",
    )
    return Table(title, ("", "plain", "with a schema", "ratio"), tuple(rows), notes)


if __name__ == "__main__":
    run_study(main)
