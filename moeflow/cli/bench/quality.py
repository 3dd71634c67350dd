"""`moeflow bench quality`: the cost of a smaller weight format, or of experts' capacity, in quality."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from moeflow.bench.records import make_record
from moeflow.bench.tables import quality_table
from moeflow.cli import lazy
from moeflow.cli.bench.output import keep, repeated_command, result_options, show
from moeflow.cli.help import Command
from moeflow.cli.local_model import prepare
from moeflow.cli.options import engine_options_but
from moeflow.cli.params import MODEL_PATH
from moeflow.cli.progress import bar

EPILOG = """\b
Examples:
  moeflow bench quality --dtype bfloat16
      the built-in model in half the memory
  moeflow bench quality ~/models/olmoe --quantize q4_k_m \\
      --text ~/texts/mine.txt --out docs/studies/results/quality.jsonl
  moeflow bench quality --capacity-factor 1.25
      what experts with a capacity cost
  moeflow bench quality olmoe-Q4_K_M.gguf --reference ~/models/olmoe
      what another program's quantizer made of it

Perplexity measures how well the model predicts text; the change is given with its standard error. The share of
likeliest tokens counts the places of the text where both formats hold the same token likeliest; the share of
greedy tokens counts those before the first different one in each continued prompt."""


@click.command(cls=Command, epilog=EPILOG)
@engine_options_but("prefix_caching", "prompt_cache", "prompt_cache_bytes")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text to measure on.  [default: the held-out part of the text that comes along]",
)
@click.option(
    "--reference",
    type=MODEL_PATH,
    help="Compare with this model, the source of MODEL.  [default: MODEL in its own precision]",
)
@click.option("--prompts", "num_prompts", type=click.IntRange(1), default=8, show_default=True, help="To continue.")
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of each continuation.")
@click.option("--seed", type=int, default=0, show_default=True, help="Where prompts are cut from the text.")
@result_options
def quality(
    overrides: dict[str, Any],
    text: Path | None,
    reference: Path | None,
    num_prompts: int,
    new_tokens: int,
    seed: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Compare a model in a smaller format with itself in its own precision.

    MODEL is a Hugging Face folder or a .gguf file; without it, the built-in model is measured.
    """
    settings = dataclasses.replace(prepare({**overrides, "max_num_seqs": 1}), prefix_caching=False)
    wide = settings if reference is None else dataclasses.replace(settings, model=str(reference))
    own, tested = lazy.resolve(lazy.in_own_precision(wide)).config, lazy.resolve(settings).config
    about = lazy.describe_comparison(own, tested)
    are_same = (about["reference_format"], about["reference_kv_dtype"]) == (about["weight_format"], about["kv_dtype"])
    if are_same and reference is None and not tested.capacity_factor:
        raise click.UsageError(
            f"nothing to compare: the model's own precision is {about['weight_format']}; ask for a smaller one"
        )
    task = lazy.make_task(tested.model_path, text, num_prompts=num_prompts, new_tokens=new_tokens, seed=seed)
    with bar(2 * task.num_steps) as shown:
        shown.say(about["reference_format"])
        of_reference = lazy.answer(own, task, shown.advance)
        shown.say(about["weight_format"])
        of_tested = lazy.answer(tested, task, shown.advance)
    fields = {**about, "text": "bundled" if text is None else text.name, **lazy.compare(of_reference, of_tested)}
    record = make_record("quality", repeated_command(), seed=seed, threads=tested.num_threads, **fields)
    keep(record, out, as_json=as_json)
    if not as_json:
        show(quality_table([record]))
