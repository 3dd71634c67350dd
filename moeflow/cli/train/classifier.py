"""`moeflow train classifier`: trains a Switch Transformer that sorts texts into classes, and measures it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from moeflow.cli import lazy
from moeflow.cli.local_model import built_in_model
from moeflow.cli.phase_bars import phase_bars
from moeflow.cli.train.common import TEXT_FILE, folder_bytes, recipe_options, run_options, show
from moeflow.train.classifiers.recipe import ClassifierRecipe

_MODEL = click.Path(exists=True, path_type=Path)

EPILOG = """\b
Examples:
  moeflow train classifier --data train.tsv --dev dev.tsv \\
      --labels negative,positive --out reviews-8
      a small one with 8 experts, in minutes
  moeflow train classifier --data train.tsv --upcycle-from reviews-8 \\
      --experts 128 --minutes 2 --out reviews-128
      16 copies of each expert, which then specialize

Each line of a file is a text, a tab and a label of one word. A tenth of --data
is held out. Training ends early when the loss on it stops improving. Ctrl-C
saves the work, and the same command resumes it. The result is a Hugging Face
folder."""


@click.command(epilog=EPILOG)
@click.option("--data", type=TEXT_FILE, required=True, help="Texts to learn from.")
@click.option("--dev", type=TEXT_FILE, help="Texts to measure with.")
@click.option("--test", type=TEXT_FILE, help="More texts to measure with.")
@click.option("--labels", help="Names of the classes, in the order of the sorted labels.  [default: the labels]")
@click.option(
    "--tokens-from", type=_MODEL, help="Model with the tokenizer and embeddings to use.  [default: the built-in one]"
)
@click.option("--upcycle-from", type=_MODEL, help="Classifier to enlarge: its sizes and tokens are used.")
@recipe_options(ClassifierRecipe)
@run_options("Folder of the classifier.", needs_out=True)
def classifier(
    data: Path,
    dev: Path | None,
    test: Path | None,
    out: Path,
    labels: str | None,
    tokens_from: Path | None,
    upcycle_from: Path | None,
    overwrite: bool,
    restart: bool,
    cache_dir: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a Switch Transformer that sorts texts into classes."""
    if tokens_from is not None and upcycle_from is not None:
        raise click.UsageError("--upcycle-from uses the tokens of its classifier: remove --tokens-from.")
    recipe = ClassifierRecipe(**options)
    names = tuple(name.strip() for name in labels.split(",")) if labels else ()
    with phase_bars() as bars:
        trained = lazy.train_classifier(
            lazy.ClassifierTexts(data=data, dev=dev, test=test, labels=names),
            recipe,
            out,
            tokens_from=None if upcycle_from else tokens_from or built_in_model(cache_dir),
            upcycle_from=upcycle_from,
            overwrite=overwrite,
            restart=restart,
            on_progress=bars.report,
        )
    result = {
        "classifier": str(trained.folder),
        "size_bytes": folder_bytes(trained.folder),
        **trained.in_figures(),
        "recipe": asdict(recipe),
    }
    show(result, _facts(result), as_json=as_json)


def _facts(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    use, num_experts, sets = result["use"], result["shape"]["num_experts"], result["accuracies"].items()
    yield "classifier", result["classifier"]
    yield "classes", ", ".join(result["labels"])
    yield "accuracy", ", ".join(f"{share:.1%} of {name.replace('_', '-')} texts" for name, share in sets)
    yield (
        "experts",
        f"a text uses {use['distinct_a_text']:.1f} of {num_experts} in a layer; {use['idle_share']:.1%} are idle",
    )
    yield "use", f"{use['used_share']:.1%} of experts are used; evenness {use['evenness']:.1%}"
    yield "time", f"{result['training_s']:.0f} s, {result['epochs']} epochs"
