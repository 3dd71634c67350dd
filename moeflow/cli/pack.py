"""`moeflow pack`: writes a model's weights in the layout that kernels read, so that they can be used as they lie."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from moeflow.cli import lazy
from moeflow.cli.config_file import config_option
from moeflow.cli.local_model import built_in_model
from moeflow.cli.options import cache_dir_option, threads_option
from moeflow.cli.params import complete_model
from moeflow.cli.progress import progress_bar
from moeflow.core.errors import MoeflowError
from moeflow.core.units import format_bytes
from moeflow.kernels.weight_format import DTYPES, MIXES, QUANTIZED

EPILOG = """\b
Examples:
  moeflow pack
      the built-in model: starts then take a moment
  moeflow pack ~/models/olmoe --quantize q4_k_m
      into the cache folder, where it is found
  moeflow pack ~/models/olmoe --out /fast-disk/olmoe.slabs
  moeflow generate ~/models/olmoe --memory 4GiB \\
      --packed-weights /fast-disk/olmoe.slabs -p "Once"

Without the file, a model's weights are packed at every start. With it, a model that fits into memory computes from
the file as it lies in the system's cache; one larger than --memory reads from it the experts that it needs, and
makes it when it is first needed. It takes about as much disk as the weights in that format.

With --quantize int8 or int4, weights are rounded in groups of 32, in any case alike. q4_k and q4_k_m search for the
numbers that change results least: q4_k takes as much as int4 and is much closer to the model's own answers; q4_k_m
takes a little more for the matrices that matter most. What matters is learnt first, from a text that comes with
moeflow, and kept in the cache folder; one layer at a time is in memory. Without this command, serve and generate round
weights at their start, with what was learnt if something was.

How routers choose is learnt then, too, from a text that comes with moeflow: it decides how often experts have to be
read, and so what `moeflow plan` and `serve` expect where memory holds only some of them.

A network of `moeflow train predictor` beside the model is copied to beside the file, where serve finds it.

The file appears when it is complete; an interrupted run is continued by the next. One that is there already is
compared with its checksums, and made anew if it is damaged or of an older version."""


@click.command(epilog=EPILOG)
@click.argument("model", required=False, shell_complete=complete_model)
@click.option(
    "--dtype",
    type=click.Choice(["auto", *DTYPES]),
    default="auto",
    show_default=True,
    help="Number format of the weights; auto: what loses nothing of them.",
)
@click.option(
    "--quantize",
    type=click.Choice((*QUANTIZED, *MIXES)),
    help="Round them to 8 or 4 bits; see below for which to take.",
)
@threads_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.  [default: in the cache folder, by model and format]",
)
@cache_dir_option
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pack(
    model: str | None,
    dtype: str,
    quantize: str | None,
    num_threads: int | None,
    out: Path | None,
    cache_dir: Path,
    as_json: bool,
) -> None:
    """Write a model's weights to a file that starts are quick with, and that experts can come from.

    MODEL is a Hugging Face folder, a .gguf file, or the name of a pulled model; without it, the built-in model is
    packed. The options that choose the number format must be those given to serve or generate later.
    """
    name = lazy.local_path(model) if model else str(built_in_model(cache_dir))
    began = time.perf_counter()
    if quantize in MIXES:
        learn_importance(name, cache_dir, num_threads)
    with progress_bar("Packing") as on_bytes:
        index = lazy.pack(
            name,
            out,
            cache_dir=cache_dir,
            dtype=dtype,
            quantize=quantize,
            num_threads=num_threads,
            on_bytes=on_bytes,
        )
    predictor = carry_predictor(name, index.path)
    routing_tokens = 0
    if index.spec.num_slabs:
        routing_tokens = learn_routing(name, index.path, cache_dir, num_threads, dtype, quantize)
    result = {
        "path": str(index.path),
        "layers": index.spec.num_layers,
        "experts": index.spec.num_experts,
        "weight_format": quantize or index.spec.weight_format,
        "has_importance": index.spec.is_weighted,
        "expert_bytes": index.spec.slab_bytes,
        "other_bytes": index.spec.resident_bytes,
        "size_bytes": index.spec.file_bytes,
        "routing_tokens": routing_tokens,
        "predictor": None if predictor is None else str(predictor),
        "seconds": round(time.perf_counter() - began, 1),
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    spec = index.spec
    experts = f"{spec.num_layers} layers of {spec.num_experts} experts, {format_bytes(spec.slab_bytes)} each"
    click.echo(
        f"{index.path}: {experts if spec.num_slabs else 'a dense model'}, in {quantize or spec.weight_format}, "
        f"{format_bytes(spec.file_bytes)} in all"
    )
    if predictor is not None:
        click.echo(f"Its expert predictor is stored next to it: {predictor}.")
    if routing_tokens:
        click.echo(f"How its routers choose is known from {routing_tokens:,} tokens: `moeflow plan` uses it.")


def carry_predictor(model: str, packed_weights_file: Path) -> Path | None:
    """Copy a network that predicts experts next to the packed weights; return its path.

    None: there is none, or a printed reason keeps it from being copied.
    """
    try:
        return lazy.carry_predictor(model, packed_weights_file)
    except MoeflowError as error:
        click.echo(f"Packed, but for the network that predicts experts: {error}", err=True)
        return None


def learn_importance(model: str, cache_dir: Path, num_threads: int | None) -> None:
    """Measure the importance of matrix inputs, unless it is known. A failure is printed."""
    with progress_bar("Learning what matters") as on_done:
        try:
            lazy.ensure_importance(model, cache_dir, num_threads, on_done)
        except (MoeflowError, OSError) as error:
            click.echo(f"All inputs count alike. What matters could not be learnt: {error}", err=True)


def learn_routing(
    model: str, packed_weights_file: Path, cache_dir: Path, num_threads: int | None, dtype: str, quantize: str | None
) -> int:
    """Learn how a packed model's routers choose, unless it is known; return from how many tokens.

    0: it cannot be measured, for a printed reason, such as a missing tokenizer or too little memory.
    """
    settings = lazy.Settings(
        model=model,
        packed_weights_file=packed_weights_file,
        cache_dir=cache_dir,
        num_threads=num_threads,
        dtype=dtype,
        quantize=quantize,
    )
    with progress_bar("Learning its routing") as on_done:
        try:
            return lazy.ensure_profile(settings, on_done).num_tokens
        except (MoeflowError, OSError) as error:
            click.echo(f"Packed. How its routers choose could not be learnt: {error}", err=True)
            return 0
