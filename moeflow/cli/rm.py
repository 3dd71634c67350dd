"""`moeflow rm`: deletes a pulled model and the files built from it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click

from moeflow.cli import lazy
from moeflow.cli.kept_bytes import bytes_in
from moeflow.cli.options import cache_dir_option
from moeflow.cli.pulling import model_name
from moeflow.core.units import format_bytes

EPILOG = """\b
Examples:
  moeflow rm Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M
      this GGUF file
  moeflow rm Qwen/Qwen3-30B-A3B@main
      this revision alone
  moeflow rm Qwen/Qwen3-30B-A3B
      all that is here of this repository, half of a pull included
  moeflow rm Qwen/Qwen3-30B-A3B --yes
      without asking, for scripts

Other tools that use the hub's cache miss the model, too. What moeflow made of it goes with it: packed weights, and what
was learnt of its routers. A server that runs keeps its files until it ends."""


@click.command(epilog=EPILOG)
@click.argument("name")
@click.option("--yes", "-y", "is_sure", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; wants --yes.")
@cache_dir_option
def rm(name: str, is_sure: bool, as_json: bool, cache_dir: Path) -> None:
    """Delete a pulled model and its packed weights.

    NAME is as `moeflow list` shows it; OWNER/NAME alone is everything of that repository.
    """
    if as_json and not is_sure:
        raise click.UsageError("--json needs --yes: it cannot ask for confirmation")
    removal = lazy.plan_removal(model_name(name), lazy.hub_cache())
    made = [file for model in removal.models for file in lazy.made_files(model.path, cache_dir)]
    num_bytes = removal.num_bytes + sum(map(bytes_in, made))
    if not is_sure:
        for what in (*(str(model.name) for model in removal.models), *map(str, made)):
            click.echo(what, err=True)
        if not sys.stdin.isatty():
            raise click.UsageError(f"this deletes {format_bytes(num_bytes)}; add --yes if no terminal can confirm")
        click.confirm(f"Delete {format_bytes(num_bytes)}?", abort=True, err=True)
    removal.run()
    for file in made:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    click.echo(json.dumps({"deleted_bytes": num_bytes}) if as_json else f"{format_bytes(num_bytes)} deleted.")
