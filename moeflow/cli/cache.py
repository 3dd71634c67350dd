"""`moeflow cache`: what the prompt cache on disk holds, and how to be rid of it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import click

from moeflow.cli import lazy
from moeflow.cli.options import cache_dir_option
from moeflow.core.units import format_bytes, format_seconds

EPILOG = """\b
Examples:
  moeflow serve --prompt-cache-size 20GiB
      keep prompts and answers in the cache folder
  moeflow cache
      what is kept there
  moeflow cache /fast-disk/prompts --clear

Blocks of keys and values lie there, of prompts and answers: whoever can read the folder can learn what was said. Only
the user who runs moeflow can. The same model counts once for each way to compute it: number formats, instruction set,
version of moeflow. What none of these uses any more is deleted when the room is needed, or by --clear. Engines that
run may be cleared under: they compute what they do not find."""


@click.command(epilog=EPILOG)
@click.argument("folder", required=False, metavar="[DIR]", type=click.Path(file_okay=False, path_type=Path))
@click.option("--clear", "clears", is_flag=True, help="Delete all of it.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@cache_dir_option
def cache(folder: Path | None, clears: bool, as_json: bool, cache_dir: Path) -> None:
    """Show what prompts and answers are kept on disk, or delete them.

    DIR is what --prompt-cache names elsewhere; without it, prompts in the cache folder.
    """
    folder = folder or lazy.default_prompt_folder(cache_dir)
    if clears:
        num_bytes = lazy.clear_folder(folder)
        click.echo(json.dumps({"deleted_bytes": num_bytes}) if as_json else f"{format_bytes(num_bytes)} deleted.")
        return
    found = lazy.folder_usage(folder)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
        return
    for one in found:
        ago = format_seconds(max(time.time() - one.last_used_s, 0.0))
        click.echo(
            f"{one.model} ({one.identity or 'not whole'}): {one.num_blocks} blocks, {format_bytes(one.num_bytes)}, "
            f"used {ago} ago"
        )
    click.echo(f"{format_bytes(sum(one.num_bytes for one in found))} in {folder}")
