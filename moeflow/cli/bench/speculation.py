"""`moeflow bench speculation`: how much faster guessed tokens make answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moeflow.bench.records import make_record
from moeflow.bench.tables import speculation_table
from moeflow.cli import lazy
from moeflow.cli.bench.output import keep, repeated_command, result_options, show
from moeflow.cli.help import Command
from moeflow.cli.local_model import prepare
from moeflow.cli.options import engine_options_but
from moeflow.cli.progress import bar

EPILOG = """\b
Examples:
  moeflow bench speculation --speculator suffix
      the built-in model, five sets of prompts
  moeflow bench speculation ~/models/olmoe --speculator suffix \\
      --prompts mine.json --temperature 0.7

One request at a time, with and without speculators in turns; the answers are the same, which is checked. A speed-up is
that of the time between tokens. It depends on what is asked: text that repeats itself or its prompt is guessed best."""


@click.command(cls=Command, epilog=EPILOG)
@engine_options_but("prefix_caching", "max_num_seqs")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON file {"set": ["prompt", ...], ...}.  [default: five sets that come along]',
)
@click.option("--new-tokens", type=click.IntRange(2), default=96, show_default=True, help="Of an answer at most.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="Of sampling; 0: greedy.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Answers to each prompt.")
@result_options
def speculation(
    overrides: dict[str, Any],
    prompts: Path | None,
    new_tokens: int,
    temperature: float,
    rounds: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure answers with speculators (--speculator) against the same answers without.

    MODEL is a Hugging Face folder or a .gguf file; without it, the built-in model is measured.
    """
    if not overrides["speculators"]:
        raise click.UsageError("say what is to guess tokens: --speculator suffix")
    config = lazy.resolve(prepare({**overrides, "max_num_seqs": 1})).config
    asked = lazy.read_prompts(prompts, config.model_path)
    with (
        lazy.SpeculationRun(config, new_tokens=new_tokens, temperature=temperature) as run,
        bar(rounds * len(asked)) as shown,
    ):
        sets = run.answer(asked, rounds, shown.advance)
    record = make_record(
        "speculation",
        repeated_command(),
        seed=0,
        threads=config.num_threads,
        model=config.model_name,
        weight_format=config.weight_format,
        speculators=list(config.speculators),
        temperature=temperature,
        prompts="bundled" if prompts is None else prompts.name,
        sets=sets,
    )
    keep(record, out, as_json=as_json)
    if not as_json:
        show(speculation_table(record))
