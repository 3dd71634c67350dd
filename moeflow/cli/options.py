"""Options that several verbs share, and where the environment is read.

The verbs' heavy imports stay out of here: wishes are passed on as plain values.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from moeflow.cli.params import NEW_FILE
from moeflow.core.errors import ConfigError
from moeflow.core.sampling_params import (
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from moeflow.core.units import MIB, parse_bytes

_LEAST_MIB = 64  # so many of something are more likely mebibytes than gibibytes

Verb = TypeVar("Verb", bound=Callable[..., Any])


def byte_count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read a size like 2GiB; for the `callback` of an option."""
    try:
        return None if value is None else parse_bytes(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def memory_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read an amount of memory likewise; a number that would be too few bytes for anything lacks its unit."""
    num_bytes = byte_count(ctx, param, value)
    if value is not None and num_bytes is not None and num_bytes < MIB and value.strip().isdecimal():
        unit = "GiB" if num_bytes < _LEAST_MIB else "MiB"
        raise click.BadParameter(
            f"{value!r} has no unit and would be bytes; did you mean {value.strip()}{unit}?", ctx, param
        )
    return num_bytes


def default_cache_dir() -> Path:
    """Where models are built and experts packed: $MOEFLOW_CACHE, else moeflow/ in $XDG_CACHE_HOME or in ~/.cache."""
    if chosen := os.environ.get("MOEFLOW_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "moeflow"


cache_dir_option = click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_cache_dir,
    show_default="$MOEFLOW_CACHE or ~/.cache/moeflow",
    help="Where the built-in model and packed experts are kept.",
)

_ENGINE_OPTIONS = [
    click.argument("model", required=False),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        show_default=True,
        help="Number format of the weights; auto: what loses nothing of them and fits.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(["int8", "int4"]),
        help="Round the weights to integers in groups of 32: smaller and faster, not quite the same answers.",
    ),
    click.option(
        "--kv-dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "int8"]),
        default="auto",
        show_default=True,
        help="Number format that keys and values are kept in.",
    ),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        help="Where to compute: cpu, cuda, cuda:1. cuda:MEMORY (experimental) uses so much of a GPU, to which experts "
        "that do not fit are streamed. emulated:MEMORY,GB_PER_S plays such a device and its link; with ,t4 behind it, "
        "processors are as much faster than the link as those of a T4 and its host, with ,torch it computes as a GPU "
        "would.",
    ),
    click.option(
        "--pipeline",
        type=click.Choice(
            ["cgopipe", "fastdecode", "flexgen-cpu-attention", "flexgen", "zero-inference", "sequential"]
        ),
        help="How weights go to a device that is smaller than the model.  [default: cgopipe]",
    ),
    click.option(
        "--micro-batch", type=click.IntRange(1), help="Tokens that go through a pipeline together.  [default: 32]"
    ),
    click.option("--threads", "num_threads", type=click.IntRange(1), help="CPU threads.  [default: all cores]"),
    click.option(
        "--max-model-len", type=click.IntRange(1), help="Prompt and answer of one request, in tokens, at most."
    ),
    click.option("--max-num-seqs", type=click.IntRange(1), help="Requests computed together, at most."),
    click.option(
        "--kv-cache",
        "kv_cache_bytes",
        metavar="SIZE",
        callback=memory_size,
        help="Memory for keys and values, such as 2GiB.",
    ),
    click.option(
        "--memory",
        "memory_bytes",
        metavar="SIZE",
        callback=memory_size,
        help="Memory for everything, such as 4GiB; experts that do not fit come from disk.",
    ),
    click.option(
        "--device-memory",
        "device_memory_bytes",
        metavar="SIZE",
        callback=memory_size,
        help="Memory of a GPU to use at most, such as 16GiB.  [default: all that is free]",
    ),
    click.option(
        "--slabs",
        "slab_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="What `moeflow pack` wrote: starts take a moment; with --memory, made if need be.  "
        "[default: in the cache folder]",
    ),
    click.option(
        "--expert-policy",
        type=click.Choice(["auto", "fifo", "lru", "lfu", "lfru"]),
        default="auto",
        show_default=True,
        help="Which expert leaves memory for another.",
    ),
    click.option(
        "--predictor",
        type=click.Choice(["auto", "next-router", "frequency", "previous-token", "none"]),
        default="auto",
        show_default=True,
        help="What experts are read ahead by, where a trial shows that passes are faster for it.",
    ),
    click.option(
        "--record-routing",
        type=NEW_FILE,
        help="Append which experts each token used to this file, for `moeflow simulate cache`.",
    ),
    click.option(
        "--trace",
        "trace_file",
        type=NEW_FILE,
        help="Write at the end what was computed, read and waited for when, for ui.perfetto.dev.",
    ),
    click.option(
        "--graph",
        "graph_file",
        type=NEW_FILE,
        help="Write at the end the tasks of the last pass, as it ran, and what they waited for, for GraphViz.",
    ),
    click.option(
        "--plan",
        "plan_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Do what `moeflow plan --json` planned; what other options say goes before.",
    ),
    cache_dir_option,
]
_ENGINE_NAMES = (
    "model",
    "dtype",
    "quantize",
    "kv_dtype",
    "device",
    "pipeline",
    "micro_batch",
    "num_threads",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_bytes",
    "memory_bytes",
    "device_memory_bytes",
    "slab_file",
    "expert_policy",
    "predictor",
    "record_routing",
    "trace_file",
    "graph_file",
    "plan_file",
    "cache_dir",
)


def _stack(options: list[Callable[[Any], Any]], function: Any) -> Any:
    return functools.reduce(lambda inner, option: option(inner), reversed(options), function)


def _gather(kwargs: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: kwargs.pop(name) for name in names}


def engine_options(verb: Verb) -> Verb:
    """Add MODEL and the options that shape an engine; the verb gets them as one dict, `wishes`."""

    @functools.wraps(verb)
    def gathered(**kwargs: Any) -> Any:
        wishes = _gather(kwargs, _ENGINE_NAMES)
        return verb(wishes={**wishes, "cpu_isa": os.environ.get("MOEFLOW_CPU_ISA", "")}, **kwargs)

    return _stack(_ENGINE_OPTIONS, gathered)  # type: ignore[no-any-return]


_SAMPLING_OPTIONS = [
    click.option(
        "--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Longest answer, in tokens."
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(0, MAX_TEMPERATURE),
        default=0.0,
        show_default=True,
        help="0: always the likeliest token; higher: more varied.",
    ),
    click.option(
        "--top-p",
        type=float,
        default=1.0,
        show_default=True,
        help="Sample from the likeliest tokens whose shares sum to this.",
    ),
    click.option(
        "--top-k", type=int, default=0, show_default=True, help="Sample from this many likeliest tokens; 0: all."
    ),
    click.option(
        "--min-p",
        type=float,
        default=0.0,
        show_default=True,
        help="Leave out tokens less likely than this share of the likeliest.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        show_default=True,
        help=f"Above 1: repeat less; from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}.",
    ),
    click.option("--seed", type=int, help="The same seed gives the same answer.  [default: a new one each time]"),
    click.option("--stop", multiple=True, help="End the answer before this text; may be given several times."),
]
_SAMPLING_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")


def sampling_options(verb: Verb) -> Verb:
    """Add the options that choose tokens; the verb gets them as `sampling`."""

    @functools.wraps(verb)
    def gathered(**kwargs: Any) -> Any:
        return verb(sampling=SamplingParams(**_gather(kwargs, _SAMPLING_NAMES)), **kwargs)

    return _stack(_SAMPLING_OPTIONS, gathered)  # type: ignore[no-any-return]
