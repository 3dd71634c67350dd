"""Options and results that the commands under `moeflow train` share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
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

TEXT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_MAX_SEQUENCES = 48  # that the model computes concurrently

Verb = TypeVar("Verb", bound=Callable[..., Any])


def target_options(verb: Verb) -> Verb:
    """Add MODEL and the options of its text."""
    return _with(
        verb,
        click.argument("model", required=False, type=MODEL_PATH),
        click.option(
            "--text-tokens", type=int, help="Number of text tokens, without a time limit.  [default: by --minutes]"
        ),
        click.option("--memory", help="Memory for the model, such as 4GiB.  [default: all free memory]"),
    )


def epoch_options(learning_rate: float, unit: str) -> Callable[[Verb], Verb]:
    """Return the options of a training in epochs. A batch counts in `unit`."""
    return lambda verb: _with(
        verb,
        click.option("--epochs", type=int, help="Most epochs, without a time limit.  [default: by --minutes]"),
        click.option(
            "--learning-rate", type=float, default=learning_rate, show_default=True, help="Highest learning rate."
        ),
        click.option("--batch-size", type=int, default=32, show_default=True, help=f"{unit} in a step."),
    )


def run_options(minutes: float, out_help: str, *, limits: str, needs_out: bool = False) -> Callable[[Verb], Verb]:
    """Return the options of every training. `limits` names the phases that `--minutes` limits."""
    out = click.Path(file_okay=False, path_type=Path)
    return lambda verb: _with(
        verb,
        click.option("--minutes", type=float, default=minutes, show_default=True, help=f"Time budget of {limits}."),
        click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same weights."),
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
