"""Answers with drafted tokens beside the same answers without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moeflow.cli.bench.output import result_options
from moeflow.cli.help import Command
from moeflow.cli.local_model import prepare
from moeflow.cli.options import engine_options_but
from moeflow.cli.params import NEW_PICTURE
from moeflow.cli.progress import bar
from moeflow.planner.resolve import resolve
from moeflow.speculation.counts import MAX_DEPTH
from moeflow.speculation.names import short_names
from studies.harness.command import run_study
from studies.harness.records import publish
from studies.speculation.plots import plot_speculation
from studies.speculation.prompts import read_prompts
from studies.speculation.run import SpeculationRun
from studies.speculation.tables import speculation_tables

EPILOG = """\b
Examples:
  python -m studies.speculation --speculator suffix
      the built-in model, five sets of prompts
  python -m studies.speculation ~/models/olmoe --speculator suffix \\
      --prompts mine.json --temperature 0.7
  python -m studies.speculation --speculator suffix \\
      --speculator dense-source --plot speed.png
      each alone and both together
  python -m studies.speculation --speculator dense-source \\
      --compare-chains 4 --compare-chains 12
      what trees are worth at the same number of drafts

One request at a time, alternately with and without speculators; equal answers are checked. A speed-up is
that of the time between tokens. It depends on what is asked: text that repeats itself or its prompt is drafted best."""


@click.command(cls=Command, epilog=EPILOG)
@engine_options_but("prefix_caching", "prompt_cache", "prompt_cache_bytes", "max_num_seqs")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON file {"set": ["prompt", ...], ...}.  [default: five sets that come along]',
)
@click.option("--new-tokens", type=click.IntRange(2), default=96, show_default=True, help="Of an answer at most.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="Of sampling; 0: greedy.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Answers to each prompt.")
@click.option(
    "--compare-chains",
    "sizes",
    type=click.IntRange(1, MAX_DEPTH),
    multiple=True,
    help="Also draft so many tokens in every pass, as a tree and as the best single chain; may be given often.",
)
@click.option(
    "--compare-pools",
    "pools",
    type=click.IntRange(1),
    multiple=True,
    help="Merge the drafts of the first so many speculators for this; may be given often.  [default: all]",
)
@click.option("--plot", type=NEW_PICTURE, help="Draw right drafts by depth, and speed-ups by set, to this PNG.")
@result_options
def speculation(
    overrides: dict[str, Any],
    prompts: Path | None,
    new_tokens: int,
    temperature: float,
    rounds: int,
    sizes: tuple[int, ...],
    pools: tuple[int, ...],
    plot: Path | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure answers with speculators (--speculator) against the same answers without.

    Of several, each drafts alone, too.

    MODEL is a Hugging Face folder or a .gguf file; without it, the built-in model is measured.
    """
    if not overrides.get("speculators"):
        raise click.UsageError("name a speculator: --speculator suffix")
    config = resolve(prepare({**overrides, "max_num_seqs": 1})).config
    asked = read_prompts(prompts, config.model_path)
    with (
        SpeculationRun(config, new_tokens=new_tokens, temperature=temperature, sizes=sizes, pools=pools) as run,
        bar(rounds * len(asked) * len(run.names)) as shown,
    ):
        arms = run.answer(asked, rounds, shown.advance)
    record = publish(
        "speculation",
        speculation_tables,
        out,
        as_json=as_json,
        threads=config.num_threads,
        model=config.model_name,
        weight_format=config.weight_format,
        speculators=list(short_names(config.speculators).values()),
        temperature=temperature,
        prompts="bundled" if prompts is None else prompts.name,
        arms=arms,
    )
    if plot is not None:
        plot_speculation(record, plot)
        click.echo(f"drew {plot}", err=True)


if __name__ == "__main__":
    run_study(speculation)
