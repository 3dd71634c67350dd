"""Options and results that the commands under `moeflow train` share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape

from moeflow.cli import lazy
from moeflow.cli.local_model import built_in_model
from moeflow.cli.options import cache_dir_option
from moeflow.cli.params import MODEL_PATH
from moeflow.cli.phase_bars import phase_bars
from moeflow.train.recipe import Recipe

TEXT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_MAX_SEQUENCES = 48  # that the model computes concurrently

Verb = TypeVar("Verb", bound=Callable[..., Any])


def recipe_options(recipe: type[Recipe]) -> Callable[[Verb], Verb]:
    """Return one option for each field of a recipe."""
    return lambda verb: _with(verb, *map(_option, fields(recipe)))


def _option(field: Field[Any]) -> Callable[[Any], Any]:
    choices, default = field.metadata["choices"], field.default
    return click.option(
        f"--{field.name.replace('_', '-')}",
        type=click.Choice(choices) if choices else int if default is None else type(default),
        default=default,
        show_default=default is not None,
        help=field.metadata["help"] + ("  [default: by --minutes]" if default is None else ""),
    )


def target_options(verb: Verb) -> Verb:
    """Add MODEL and its memory."""
    memory = click.option("--memory", help="Memory for the model, such as 4GiB.  [default: all free memory]")
    return _with(verb, click.argument("model", required=False, type=MODEL_PATH), memory)


def run_options(out_help: str, *, needs_out: bool = False) -> Callable[[Verb], Verb]:
    """Return the options of every training that do not change the weights."""
    out = click.Path(file_okay=False, path_type=Path)
    return lambda verb: _with(
        verb,
        click.option("--out", type=out, required=needs_out, help=out_help),
        click.option("--overwrite", is_flag=True, help="Replace an existing result."),
        click.option("--restart", is_flag=True, help="Discard unfinished work."),
        cache_dir_option,
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    )


def _with(verb: Verb, *options: Callable[[Any], Any]) -> Verb:
    decorated: Verb = functools.reduce(lambda inner, option: option(inner), reversed(options), verb)
    return decorated


def distilled(
    train: Callable[..., Any], recipe: Any, model: Path | None, cache_dir: Path, memory: str | None, **options: Any
) -> Any:
    """Return the result of a training for a model, by default the built-in one. Shows progress bars."""
    path = model or built_in_model(cache_dir)
    with phase_bars() as bars:
        return train(_teacher_settings(path, cache_dir, memory), recipe, on_progress=bars.report, **options)


def _teacher_settings(model: Path, cache_dir: Path, memory: str | None) -> lazy.Settings:
    """Return the settings of a model to learn from: in int8 if the kernels support it, within `memory` if given."""
    values = lazy.read_settings(
        lazy.Settings,
        {"model": str(model), "max_num_seqs": _MAX_SEQUENCES, "cache_dir": cache_dir}
        | ({"quantize": "int8"} if lazy.cpu.is_available() else {})
        | ({"memory_bytes": memory} if memory else {}),
    )
    return lazy.Settings(**values)


def folder_bytes(folder: Path) -> int:
    """Return the size of a result's files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def show(result: dict[str, Any], facts: Iterable[tuple[str, str]], *, as_json: bool) -> None:
    """Print the result as JSON, or its facts, one per line."""
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False)
    for name, value in facts:
        console.print(f"[bold]{name:<16}[/]{escape(value)}")
