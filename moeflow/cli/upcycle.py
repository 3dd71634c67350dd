"""`moeflow upcycle`: makes a Mixture-of-Experts model from a dense one and measures it."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from moeflow.cli import lazy
from moeflow.cli.params import MODEL_PATH
from moeflow.cli.phase_bars import phase_bars
from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes

if TYPE_CHECKING:
    from moeflow.train.upcycling_quality import Quality

MEASURING = "measuring"

EPILOG = """\b
Examples:
  moeflow upcycle ~/models/SmolLM2-135M-Instruct --out ~/models/smol-8x135m
  moeflow upcycle model.gguf --experts 64 --top-k 6 \\
      --out ~/models/smol-64x135m
  moeflow upcycle ~/models/dense --out ~/models/moe \\
      --calibration my-texts.txt --json

The experts start as copies of the dense feed-forward network with a little noise, so the new model speaks as
the dense one does: it is larger, not better. It is a Hugging Face folder that transformers loads, too."""


@click.command(epilog=EPILOG)
@click.argument("source", type=MODEL_PATH)
@click.option("--experts", "num_experts", type=int, default=8, show_default=True, help="Experts in each layer.")
@click.option("--top-k", type=int, default=2, show_default=True, help="Experts that each token uses.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option(
    "--perturbation",
    type=float,
    default=0.02,
    show_default=True,
    help="Noise on each expert, as a share of the spread of its weights.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same model.")
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text to fit the routers on.  [default: prose, speech, chat, code and more, which come along]",
)
@click.option("--overwrite", is_flag=True, help="Replace the model at --out, once the new one is complete.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def upcycle(
    source: Path,
    num_experts: int,
    top_k: int,
    out: Path,
    perturbation: float,
    seed: int,
    calibration: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Make a Mixture-of-Experts model from a dense one.

    SOURCE is a model of the Llama architecture: a Hugging Face folder or a .gguf file. An interrupted run
    leaves nothing behind.
    """
    began = time.perf_counter()
    recipe = lazy.UpcycleRecipe(num_experts=num_experts, top_k=top_k, perturbation=perturbation, seed=seed)
    quality, not_measured = None, None
    with phase_bars() as bars:
        bars.begin("reading")
        lazy.upcycle(source, out, recipe, calibration=calibration, overwrite=overwrite, on_progress=bars.report)
        bars.begin(MEASURING)
        try:
            quality = lazy.measure_quality(
                source, out, calibration=calibration, on_tokens=partial(bars.report, MEASURING)
            )
        except CapacityError as error:  # the model is complete; it is only too large for this machine
            not_measured = str(error)
    result = {
        "path": str(out),
        "experts": num_experts,
        "top_k": top_k,
        "size_bytes": sum(file.stat().st_size for file in out.iterdir()),
        "quality": None if quality is None else summary(quality),
        "not_measured": not_measured,
        "seconds": bars.seconds | {"total": round(time.perf_counter() - began, 1)},
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        show(result)


def summary(quality: Quality) -> dict[str, Any]:
    """Return the figures that are shown."""
    return {
        "tokens": quality.num_tokens,
        "dense_perplexity": round(quality.dense_perplexity, 3),
        "moe_perplexity": round(quality.moe_perplexity, 3),
        "busiest_expert_shares": [round(share, 4) for share in quality.busiest_shares],
        "idlest_expert_shares": [round(share, 4) for share in quality.idlest_shares],
    }


def show(result: dict[str, Any]) -> None:
    """Print the result, one fact a line."""
    console = Console(soft_wrap=True, highlight=False)
    for name, value in rows(result):
        console.print(f"[bold]{name:<16}[/]{escape(value)}")


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
    dense, moe = quality["dense_perplexity"], quality["moe_perplexity"]
    change = f"{(moe / dense - 1) * 100:+.1f}%"
    return [
        ("perplexity", f"{dense:.2f} dense, {moe:.2f} now ({change}), on {quality['tokens']:,} tokens held out"),
        ("busiest expert", shares_text(quality["busiest_expert_shares"])),
        ("idlest expert", shares_text(quality["idlest_expert_shares"])),
    ]


def shares_text(shares: list[float]) -> str:
    """Write the lowest and highest share over all layers."""
    low, high = shares
    return f"{low:.0%} to {high:.0%} of the choices in its layer"
