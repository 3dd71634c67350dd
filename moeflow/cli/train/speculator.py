"""`moeflow train speculator`: distils small models that guess a model's next tokens, and measures how well."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeflow.cli import lazy
from moeflow.cli.local_model import built_in_model
from moeflow.cli.options import cache_dir_option
from moeflow.cli.params import MODEL_PATH
from moeflow.cli.phase_bars import phase_bars
from moeflow.cli.train.common import print_facts, teacher_settings

if TYPE_CHECKING:
    from moeflow.train.speculators.distillation import Pool

EPILOG = """\b
Examples:
  moeflow train speculator
      for the built-in model, in under 30 minutes on two cores
  moeflow train speculator ~/models/olmoe --minutes 60 --pool 3
  moeflow train speculator model.gguf --data my-prompts.txt
  moeflow serve ~/models/olmoe --speculator auto
      guess with what was trained: answers stay the same

The model makes up questions and answers them, and goes on with pieces of --data; the small model, which starts as the
model's own embeddings, first and last layers and output matrix, learns to say the same. Of a pool, each next one learns
above all where those before it were wrong. The same command goes on after Ctrl-C or a kill. What gets no better on text
that was held out ends the training early. State is kept once a minute, and after each 64 answers."""


@click.command(epilog=EPILOG)
@click.argument("model", required=False, type=MODEL_PATH)
@click.option("--pool", type=int, default=1, show_default=True, help="How many to train, to guess together.")
@click.option("--layers", type=int, default=6, show_default=True, help="Of each: more guess better, and take longer.")
@click.option("--minutes", type=float, default=25.0, show_default=True, help="That all of it may take.")
@click.option("--text-tokens", type=int, help="That the model says, however long it takes.  [default: by --minutes]")
@click.option("--steps", type=int, help="Of each training, however long it takes.  [default: by --minutes]")
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text to make prompts of, as like your use as can be.  [default: prose, chat, code, which come along]",
)
@click.option("--temperature", type=float, default=0.8, show_default=True, help="Of the model's answers.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of text and training.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for 1/, 2/, ...  [default: MODEL/speculators, or beside a file: MODEL.speculators]",
)
@click.option("--overwrite", is_flag=True, help="Replace speculators that are there.")
@click.option("--restart", is_flag=True, help="Forget work that was interrupted.")
@click.option(
    "--memory", "memory", help="What the model may take while it answers, such as 4GiB.  [default: what is free]"
)
@cache_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def speculator(
    model: Path | None,
    data: Path | None,
    out: Path | None,
    overwrite: bool,
    restart: bool,
    memory: str | None,
    cache_dir: Path,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Train a small model that guesses the next tokens of MODEL.

    MODEL is a Hugging Face folder or a .gguf file; without it, the built-in model.
    """
    began_s = time.perf_counter()
    made = lazy.SpeculatorRecipe(**recipe)
    path = model or built_in_model(cache_dir)
    with phase_bars() as bars:
        pool = lazy.train_speculators(
            teacher_settings(path, cache_dir, memory),
            made,
            out=out,
            data=data,
            overwrite=overwrite,
            restart=restart,
            on_progress=bars.report,
        )
    result = summary(pool) | {"recipe": asdict(made), "seconds": round(time.perf_counter() - began_s, 1)}
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        show(result, "moeflow chat" if model is None else f"moeflow chat {model}", is_beside=out is None)


def summary(pool: Pool) -> dict[str, Any]:
    """Return what was made, in figures."""
    return {
        "speculators": [str(folder) for folder in pool.folders],
        "size_bytes": [sum(file.stat().st_size for file in folder.iterdir()) for folder in pool.folders],
        "text_tokens": pool.text_tokens,
        "held_out_tokens": pool.held_out_places,
        "agreement": [round(share, 4) for share in pool.agreement],
        "coverage": {f"top{number}": [round(share, 4) for share in of] for number, of in pool.coverage.items()},
    }


def show(result: dict[str, Any], verb: str, *, is_beside: bool) -> None:
    """Print the result, one fact a line."""
    lines = [("speculators", ", ".join(result["speculators"]))]
    lines += [
        (
            f"first {number + 1}" if number else "the first",
            f"guess {top1:.1%} of tokens, {top3:.1%} with three guesses each ({result['agreement'][number]:.1%}: the "
            "last one's guess is the model's likeliest)",
        )
        for number, (top1, top3) in enumerate(zip(*result["coverage"].values(), strict=True))
    ]
    guessing = "--speculator auto" if is_beside else " ".join(f"--speculator {each}" for each in result["speculators"])
    lines += [
        ("measured on", f"{result['held_out_tokens']:,} of {result['text_tokens']:,} tokens of the model's text"),
        ("time", f"{result['seconds']:.0f} s"),
        ("try it", f"{verb} {guessing}"),
    ]
    print_facts(lines)
