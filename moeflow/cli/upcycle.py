"""`moeflow upcycle`: makes a Mixture-of-Experts model from a dense one and measures it."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moeflow.cli import lazy
from moeflow.cli.params import MODEL_PATH
from moeflow.cli.phase_bars import PhaseBars, phase_bars
from moeflow.cli.train.common import recipe_options
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.units import format_bytes
from moeflow.train.experts.recipe import ExpertRecipe

if TYPE_CHECKING:
    from moeflow.train.upcycling_quality import Quality

MEASURING = "measuring"
_OF_COPIES = ("perturbation", "calibration")
_OF_TRAINING = ("data", "restart", "rank", "minutes", "steps", "joint_steps", "learning_rate")

EPILOG = """\b
Examples:
  moeflow upcycle ~/models/SmolLM2-135M-Instruct --out ~/models/smol-8x135m
  moeflow upcycle model.gguf --experts 64 --top-k 6 \\
      --out ~/models/smol-64x135m
  moeflow upcycle ~/models/dense --out ~/models/moe \\
      --calibration my-texts.txt --json
  moeflow upcycle ~/models/dense --out ~/models/moe --train \\
      --data code=code.txt --data law=law.txt --minutes 120

The experts start as copies of the dense feed-forward network with a little noise, so the new model speaks as
the dense one does: it is larger, not better. With --train each expert learns from one text. Then a joint
phase trains all experts and their routers (branch-train-mix, 2403.07816). The model becomes better on such
texts. Ctrl-C saves this training, and the same command resumes it. The result is a Hugging Face folder that
transformers loads, too."""


@click.command(epilog=EPILOG)
@click.argument("source", type=MODEL_PATH)
@click.option("--experts", "num_experts", type=int, help="Experts in each layer.  [default: 8]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option(
    "--perturbation",
    type=float,
    default=0.02,
    show_default=True,
    help="Noise on each expert, as a share of the spread of its weights.",
)
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text to fit the routers on.  [default: prose, speech, chat, code and more, which come along]",
)
@click.option("--train", "trains", is_flag=True, help="Train one expert for each text.")
@click.option(
    "--data",
    multiple=True,
    metavar="[NAME=]FILE",
    help="Text of one expert, for --train; several.  [default: the package's own texts]",
)
@recipe_options(ExpertRecipe)
@click.option("--overwrite", is_flag=True, help="Replace the model at --out, once the new one is complete.")
@click.option("--restart", is_flag=True, help="Discard unfinished work (--train).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def upcycle(
    source: Path,
    num_experts: int | None,
    out: Path,
    perturbation: float,
    calibration: Path | None,
    trains: bool,
    data: tuple[str, ...],
    overwrite: bool,
    restart: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Make a Mixture-of-Experts model from a dense one.

    SOURCE is a model of the Llama architecture: a Hugging Face folder or a .gguf file. Without --train, an
    interrupted run leaves nothing behind.
    """
    began = time.perf_counter()
    recipe = ExpertRecipe(**options)
    if trains:
        _refuse(_OF_COPIES, "belongs to experts that are copies: leave out --train")
        files = lazy.named_files(data)
        _check_count(num_experts, len(files))
        num_experts, read_texts = len(files), partial(lazy.measured_text, files=files)
        make = partial(lazy.train_experts, source, out, recipe, files, restart=restart)
    else:
        _refuse(_OF_TRAINING, "belongs to a training: add --train")
        read_texts = partial(lazy.calibration_text, file=calibration)
        copied = lazy.UpcycleRecipe(
            num_experts=8 if num_experts is None else num_experts,
            top_k=recipe.top_k,
            perturbation=perturbation,
            seed=recipe.seed,
        )
        num_experts = copied.num_experts
        make = partial(lazy.upcycle, source, out, copied, calibration=calibration)
    with phase_bars() as bars:
        bars.begin("reading")
        make(overwrite=overwrite, on_progress=bars.report)
        quality, not_measured = _measured(source, out, read_texts, bars)
    result = {
        "path": str(out),
        "experts": num_experts,
        "top_k": recipe.top_k,
        "size_bytes": sum(file.stat().st_size for file in out.iterdir()),
        "quality": None if quality is None else summary(quality),
        "not_measured": not_measured,
        "seconds": bars.seconds | {"total": round(time.perf_counter() - began, 1)},
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        show(result)


def _refuse(names: tuple[str, ...], problem: str) -> None:
    """Raise ConfigError if the user gave one of these options."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')} {problem}")


def _check_count(num_experts: int | None, num_texts: int) -> None:
    if num_experts not in (None, num_texts):
        raise ConfigError(
            f"--train makes one expert for each text: there are {num_texts} texts, but --experts is {num_experts}"
        )


def _measured(source: Path, out: Path, read_texts: Any, bars: PhaseBars) -> tuple[Quality | None, str | None]:
    """Return the quality of a complete model, or the reason why this machine cannot measure it."""
    bars.begin(MEASURING)
    try:
        return (
            lazy.measure_quality(source, out, read_texts=read_texts, on_tokens=partial(bars.report, MEASURING)),
            None,
        )
    except CapacityError as error:
        return None, str(error)


def summary(quality: Quality) -> dict[str, Any]:
    """Return the figures that are shown."""
    return {
        "tokens": quality.num_tokens,
        "dense_perplexity": round(quality.dense_perplexity, 3),
        "moe_perplexity": round(quality.moe_perplexity, 3),
        "permuted_perplexity": round(quality.permuted_perplexity, 3),
        "mean_ratio": round(quality.mean_ratio, 4),
        "routing_entropy": round(quality.routing_entropy, 4),
        "busiest_expert_shares": [round(share, 4) for share in quality.busiest_shares],
        "idlest_expert_shares": [round(share, 4) for share in quality.idlest_shares],
        "texts": [
            {
                "name": text.name,
                "tokens": text.num_tokens,
                "dense_perplexity": round(text.dense_perplexity, 3),
                "moe_perplexity": round(text.moe_perplexity, 3),
                "permuted_perplexity": round(text.permuted_perplexity, 3),
                "expert_shares": [round(share, 4) for share in text.expert_shares],
                "routing_entropy": round(text.routing_entropy, 4),
            }
            for text in quality.texts
        ],
    }


def show(result: dict[str, Any]) -> None:
    """Print the result, one fact a line."""
    console = Console(soft_wrap=True, highlight=False)
    for name, value in rows(result):
        console.print(f"[bold]{name:<16}[/]{escape(value)}")
    if result["quality"] is not None and len(result["quality"]["texts"]) > 1:
        console.print(texts_table(result["quality"]["texts"]))


def texts_table(texts: list[dict[str, Any]]) -> Table:
    """Return a table of the held-out texts."""
    table = Table(box=box.SIMPLE)
    for title in ("text", "dense", "now", "change", "permuted", "entropy", "shares of experts"):
        table.add_column(title, justify="left" if title.startswith(("text", "shares")) else "right")
    for text in texts:
        dense, moe, permuted = (text[f"{name}_perplexity"] for name in ("dense", "moe", "permuted"))
        table.add_row(
            escape(text["name"]),
            f"{dense:.2f}",
            f"{moe:.2f}",
            f"{moe / dense - 1:+.1%}",
            f"{permuted:.2f}",
            f"{text['routing_entropy']:.2f}",
            " ".join(f"{share:.0%}" for share in text["expert_shares"]),
        )
    return table


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines to show, each with its name."""
    seconds = ", ".join(f"{phase} {count:.0f} s" for phase, count in result["seconds"].items())
    return [
        ("model", result["path"]),
        ("experts", f"{result['experts']} a layer, {result['top_k']} a token"),
        ("size", format_bytes(result["size_bytes"])),
        *quality_rows(result["quality"], result["not_measured"]),
        ("time", seconds),
        ("try it", f"moeflow chat {result['path']}"),
    ]


def quality_rows(quality: dict[str, Any] | None, not_measured: str | None) -> list[tuple[str, str]]:
    """Return lines with the measurements, or with the reason for their absence."""
    if quality is None:
        return [("perplexity", f"not measured: {not_measured}")]
    dense, moe, permuted = (quality[f"{name}_perplexity"] for name in ("dense", "moe", "permuted"))
    change = f"{(moe / dense - 1) * 100:+.1f}%"
    return [
        ("perplexity", f"{dense:.2f} dense, {moe:.2f} now ({change}), on {quality['tokens']:,} tokens held out"),
        ("busiest expert", shares_text(quality["busiest_expert_shares"])),
        ("idlest expert", shares_text(quality["idlest_expert_shares"])),
        ("permuted", f"perplexity {permuted:.2f} ({(permuted / moe - 1) * 100:+.1f}%)"),
    ]


def shares_text(shares: list[float]) -> str:
    """Write the lowest and highest share over all layers."""
    low, high = shares
    return f"{low:.0%} to {high:.0%} of the choices in its layer"
