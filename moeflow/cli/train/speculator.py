"""`moeflow train speculator`: distils small draft models for a model, and measures them."""

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
from moeflow.train.speculators.recipe import SpeculatorRecipe

EPILOG = """\b
Examples:
  moeflow train speculator
      for the built-in model, in under 30 minutes on two cores
  moeflow train speculator ~/models/olmoe --minutes 60 --pool 3
  moeflow train speculator model.gguf --data my-prompts.txt
  moeflow serve ~/models/olmoe --speculator auto
      use the result as a draft model: answers stay the same

The model generates questions and answers, and continues pieces of --data. The
draft model learns to predict this text. It starts from the model's own
embeddings, first and last layers, and output matrix. In a pool, each one
learns mostly from the errors of those before it. Training ends early when the
loss on held-out text stops improving. Ctrl-C saves the work, and the same
command resumes it."""


@click.command(epilog=EPILOG)
@click.option(
    "--data", type=TEXT_FILE, help="Text for prompts, similar to your use.  [default: the package's own texts]"
)
@target_options
@recipe_options(SpeculatorRecipe)
@run_options("Folder for 1/, 2/, ...  [default: MODEL/speculators, or MODEL.speculators for a file]")
def speculator(
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
    """Train a small draft model for MODEL.

    MODEL is a Hugging Face folder or a .gguf file; by default the built-in model.
    """
    began_s = time.perf_counter()
    recipe = SpeculatorRecipe(**options)
    place = {"data": data, "out": out, "overwrite": overwrite, "restart": restart}
    pool = distilled(lazy.train_speculators, recipe, model, cache_dir, memory, **place)
    result = {
        "speculators": [str(folder) for folder in pool.folders],
        "size_bytes": [folder_bytes(folder) for folder in pool.folders],
        "text_tokens": pool.text_tokens,
        "held_out_tokens": pool.held_out_places,
        "agreement": [round(share, 4) for share in pool.agreement],
        "coverage": {f"top{number}": [round(share, 4) for share in of] for number, of in pool.coverage.items()},
        "recipe": asdict(recipe),
        "seconds": round(time.perf_counter() - began_s, 1),
    }
    use = "--speculator auto" if out is None else " ".join(f"--speculator {folder}" for folder in pool.folders)
    show(result, _facts(result, f"moeflow chat {model or ''}".rstrip() + f" {use}"), as_json=as_json)


def _facts(result: dict[str, Any], command: str) -> Iterator[tuple[str, str]]:
    yield "speculators", ", ".join(result["speculators"])
    for number, (top1, top3) in enumerate(zip(*result["coverage"].values(), strict=True), start=1):
        agreement = result["agreement"][number - 1]
        yield (
            f"first {number}",
            f"predict {top1:.1%} of tokens, {top3:.1%} within three candidates each; "
            f"number {number} agrees with the model's likeliest token in {agreement:.1%}",
        )
    yield "measured on", f"{result['held_out_tokens']:,} of {result['text_tokens']:,} tokens of the model's text"
    yield "time", f"{result['seconds']:.0f} s"
    yield "try it", command
