"""`moeflow train predictor`: distils a network that predicts each token's experts, and measures it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from moeflow.cli import lazy
from moeflow.cli.train.common import (
    TEXT_FILE,
    distilled,
    folder_bytes,
    recipe_options,
    run_options,
    show,
    target_options,
)
from moeflow.train.predictors.recipe import PredictorRecipe

EPILOG = """\b
Examples:
  moeflow train predictor
      for the built-in model
  moeflow train predictor ~/models/olmoe --data my-texts.txt --minutes 60
  moeflow serve ~/models/olmoe --memory 4GiB --predictor sida
      prefetch the predicted experts: answers stay the same

Half of the time goes to text: the model reads pieces of --data, or its own
answers. The network learns from the routers which experts a token needs in
all layers, given the tokens so far (SiDA, 2310.18859). An encoder-decoder gets
a network for each stack with experts. Training ends early when the loss on
held-out text stops improving. Ctrl-C saves the work, and the same command
resumes it."""


@click.command(epilog=EPILOG)
@click.option(
    "--data",
    type=TEXT_FILE,
    help="Text similar to your use, or a .tsv with inputs in its first column; encoder-decoders need it.  "
    "[default: the model's own text]",
)
@target_options
@recipe_options(PredictorRecipe)
@run_options("Folder.  [default: MODEL/predictor, or MODEL.predictor for a file]")
def predictor(
    model: Path | None,
    memory: str | None,
    cache_dir: Path,
    data: Path | None,
    out: Path | None,
    overwrite: bool,
    restart: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a network that predicts the experts of each token in MODEL.

    MODEL is a Hugging Face folder or a .gguf file; by default the built-in model.
    """
    began_s = time.perf_counter()
    recipe = PredictorRecipe(**options)
    place = {"data": data, "out": out, "overwrite": overwrite, "restart": restart}
    trained = distilled(lazy.train_predictor, recipe, model, cache_dir, memory, **place)
    result = {
        "predictor": str(trained.folder),
        "size_bytes": folder_bytes(trained.folder),
        **trained.in_figures(),
        "recipe": asdict(recipe),
        "seconds": round(time.perf_counter() - began_s, 1),
    }
    verb = "moeflow chat" if model is None else f"moeflow serve {model}"
    use = f"{verb} --memory 1GiB --predictor sida" if out is None else "move the folder to MODEL/predictor first"
    show(result, _facts(result, use), as_json=as_json)


def _facts(result: dict[str, Any], use: str) -> Iterator[tuple[str, str]]:
    mean, top_k, worst = result["mean_hit_rates"], result["top_k"], min(result["hit_rates"]["top_k"])
    yield "predictor", result["predictor"]
    yield "likeliest expert", f"{mean['top1']:.1%} first, {mean['top3']:.1%} among three predictions (mean over layers)"
    yield (
        f"all {top_k} experts",
        f"{mean['top_k']:.1%} among {top_k} predictions, {worst:.1%} in the worst layer; "
        f"{mean['most_used']:.1%} for the most used experts as a constant prediction",
    )
    yield "measured on", f"{result['held_out_tokens']:,} of {result['text_tokens']:,} tokens"
    yield "time", f"{result['seconds']:.0f} s, {result['epochs']} epochs"
    yield "try it", use
