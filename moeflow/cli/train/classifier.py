"""`moeflow train classifier`: trains a Switch Transformer that sorts texts into classes, and measures it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from moeflow.cli import lazy
from moeflow.cli.local_model import built_in_model
from moeflow.cli.options import cache_dir_option
from moeflow.cli.phase_bars import phase_bars
from moeflow.cli.train.common import print_facts

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_MODEL = click.Path(exists=True, path_type=Path)

EPILOG = """\b
Examples:
  moeflow train classifier --data train.tsv --dev dev.tsv \\
      --labels negative,positive --out reviews-8
      a small one with 8 experts, in minutes
  moeflow train classifier --data train.tsv --upcycle-from reviews-8 \\
      --experts 128 --minutes 2 --out reviews-128
      each of its experts 16 times, which then learn to differ

Each line of a file is a text, a tab and a label of one word. A tenth of --data is held out; what gets no better on it
ends the training early. The same command goes on after Ctrl-C or a kill. The result is a Hugging Face folder."""


@click.command(epilog=EPILOG)
@click.option("--data", type=_FILE, required=True, help="Texts to learn from.")
@click.option("--dev", type=_FILE, help="Texts to measure with.")
@click.option("--test", type=_FILE, help="More texts to measure with.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the classifier.")
@click.option("--labels", help="Names of classes, in the order of the sorted labels.  [default: the labels]")
@click.option(
    "--tokens-from", type=_MODEL, help="Model whose tokenizer and embeddings are used.  [default: the built-in one]"
)
@click.option("--upcycle-from", type=_MODEL, help="Classifier to enlarge; its sizes and tokens are taken.")
@click.option("--experts", type=int, default=8, show_default=True, help="Of each layer that has some.")
@click.option("--layers", type=int, default=2, show_default=True, help="In all.")
@click.option("--sparse-layers", type=int, default=2, show_default=True, help="With experts.")
@click.option("--heads", type=int, default=9, show_default=True, help="Of attention.")
@click.option("--head-dim", type=int, default=64, show_default=True, help="Size of a head.")
@click.option("--ffn-size", type=int, default=512, show_default=True, help="Of an expert.")
@click.option("--minutes", type=float, default=5.0, show_default=True, help="That training may take.")
@click.option("--epochs", type=int, help="At most, however long they take.  [default: by --minutes]")
@click.option("--learning-rate", type=float, default=6e-4, show_default=True, help="Of Adam.")
@click.option("--batch-size", type=int, default=32, show_default=True, help="Texts of a step.")
@click.option("--dropout", type=float, default=0.2, show_default=True, help="While it learns.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all that is drawn.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="Of the result."
)
@click.option("--overwrite", is_flag=True, help="Replace a model that is there.")
@click.option("--restart", is_flag=True, help="Forget work that was interrupted.")
@cache_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
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
    **recipe: Any,
) -> None:
    """Train a Switch Transformer that sorts texts into classes."""
    if tokens_from is not None and upcycle_from is not None:
        raise click.UsageError("--upcycle-from takes the tokens of the classifier: leave --tokens-from out.")
    made = lazy.ClassifierRecipe(**recipe)
    names = tuple(name.strip() for name in labels.split(",")) if labels else ()
    with phase_bars() as bars:
        trained = lazy.train_classifier(
            lazy.ClassifierTexts(data=data, dev=dev, test=test, labels=names),
            made,
            out,
            tokens_from=None if upcycle_from else tokens_from or built_in_model(cache_dir),
            upcycle_from=upcycle_from,
            overwrite=overwrite,
            restart=restart,
            on_progress=bars.report,
        )
    result = {
        "classifier": str(trained.folder),
        "size_bytes": sum(file.stat().st_size for file in trained.folder.iterdir()),
        **trained.in_figures(),
        "recipe": asdict(made),
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """Print the result, one fact a line."""
    use, num_experts = result["use"], result["shape"]["num_experts"]
    accuracies = ", ".join(
        f"{share:.1%} of {name.replace('_', '-')} texts" for name, share in result["accuracies"].items()
    )
    lines = [
        ("classifier", result["classifier"]),
        ("classes", ", ".join(result["labels"])),
        ("right", accuracies),
        (
            "experts",
            f"a text needs {use['distinct_a_text']:.1f} of {num_experts} a layer; {use['idle_share']:.1%} are idle",
        ),
        ("use", f"{use['used_share']:.1%} of experts are used, {use['evenness']:.1%} as evenly as can be"),
        ("time", f"{result['training_s']:.0f} s, {result['epochs']} epochs"),
    ]
    print_facts(lines)
