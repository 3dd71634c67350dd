"""`moeflow train predictor`: distils a network that knows which experts a token will need, and measures how well."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from moeflow.cli import lazy
from moeflow.cli.local_model import built_in_model
from moeflow.cli.options import cache_dir_option
from moeflow.cli.params import MODEL_PATH
from moeflow.cli.phase_bars import phase_bars
from moeflow.cli.train.common import print_facts, teacher_settings

EPILOG = """\b
Examples:
  moeflow train predictor
      for the built-in model
  moeflow train predictor ~/models/olmoe --data my-texts.txt --minutes 60
  moeflow serve ~/models/olmoe --memory 4GiB --predictor sida
      read ahead what it predicts: answers stay the same

The model runs over pieces of --data, or over what it says itself, and the network learns from its routers which experts
of all layers a token needs, from the tokens so far alone (SiDA, 2310.18859); of an encoder-decoder, it learns those of
the encoder. The same command goes on after Ctrl-C or a
kill. What gets no better on text that was held out ends the training early."""


@click.command(epilog=EPILOG)
@click.argument("model", required=False, type=MODEL_PATH)
@click.option("--minutes", type=float, default=20.0, show_default=True, help="That all of it may take, half for text.")
@click.option("--text-tokens", type=int, help="To learn from, however long it takes.  [default: by --minutes]")
@click.option("--epochs", type=int, help="At most, however long they take.  [default: by --minutes]")
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text to learn from, as like your use as can be, or a .tsv with an input in the first column of each line; "
    "encoder-decoders need one.  [default: what the model says]",
)
@click.option(
    "--learning-rate",
    type=float,
    default=3e-3,
    show_default=True,
    help="Of AdamW, at its height. The paper's is 5e-5, which takes far longer.",
)
@click.option("--batch-size", type=int, default=32, show_default=True, help="Pieces of text of a step.")
@click.option("--hidden-size", type=int, default=256, show_default=True, help="Of the network.")
@click.option("--window", type=int, default=128, show_default=True, help="Tokens that it attends to.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of text and training.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder.  [default: MODEL/predictor, or beside a file: MODEL.predictor]",
)
@click.option("--overwrite", is_flag=True, help="Replace a predictor that is there.")
@click.option("--restart", is_flag=True, help="Forget work that was interrupted.")
@click.option("--memory", "memory", help="What the model may take, such as 4GiB.  [default: what is free]")
@cache_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def predictor(
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
    """Train a network that knows which experts MODEL needs for a token before it is computed.

    MODEL is a Hugging Face folder or a .gguf file; without it, the built-in model.
    """
    began_s = time.perf_counter()
    made = lazy.PredictorRecipe(**recipe)
    path = model or built_in_model(cache_dir)
    with phase_bars() as bars:
        trained = lazy.train_predictor(
            teacher_settings(path, cache_dir, memory),
            made,
            out=out,
            data=data,
            overwrite=overwrite,
            restart=restart,
            on_progress=bars.report,
        )
    result = {
        "predictor": str(trained.folder),
        "size_bytes": sum(file.stat().st_size for file in trained.folder.iterdir()),
        **trained.in_figures(),
        "recipe": asdict(made),
        "seconds": round(time.perf_counter() - began_s, 1),
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        show(result, "moeflow chat" if model is None else f"moeflow serve {model}", is_beside=out is None)


def show(result: dict[str, Any], verb: str, *, is_beside: bool) -> None:
    """Print the result, one fact a line."""
    mean, top_k = result["mean_hit_rates"], result["top_k"]
    worst = min(result["hit_rates"]["top_k"])
    lines = [
        ("predictor", result["predictor"]),
        ("hits", f"{mean['top1']:.1%} of likeliest experts, {mean['top3']:.1%} with three guesses (mean over layers)"),
        (
            f"of all {top_k}",
            f"{mean['top_k']:.1%} with {top_k} guesses, {worst:.1%} in the worst layer; {mean['most_used']:.1%} if "
            "always the most used are guessed",
        ),
        ("measured on", f"{result['held_out_tokens']:,} of {result['text_tokens']:,} tokens"),
        ("time", f"{result['seconds']:.0f} s, {result['epochs']} epochs"),
        ("try it", f"{verb} --memory 1GiB --predictor sida" if is_beside else "once its folder is MODEL/predictor"),
    ]
    print_facts(lines)
