"""`moeflow cache`: shows the files of moeflow on this disk and the contents of the prompt cache, and deletes them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moeflow.cli import lazy
from moeflow.cli.kept_bytes import bytes_in, made_again, places
from moeflow.cli.options import cache_dir_option
from moeflow.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from moeflow.kv.disk.folder_usage import ModelUsage

EPILOG = """\b
Examples:
  moeflow serve --prompt-cache-size 20GiB
      keep prompts and answers in the cache folder
  moeflow cache
      what lies where: models, packed weights, prompts
  moeflow cache /fast-disk/prompts --clear
  moeflow cache --clear-packed
      they are made again when they are needed

Models lie in the hub library's cache, all else in the cache folder. Of prompts and answers blocks of keys and values
are kept: whoever can read them can learn what was said. Only the user who runs moeflow can. The same model counts once
for each way to compute it: number formats, instruction set, version of moeflow. What none of these uses any more is
deleted when the room is needed, or by --clear. Engines that run may be cleared under: they compute what they do not
find."""


@click.command(epilog=EPILOG)
@click.argument("folder", required=False, metavar="[DIR]", type=click.Path(file_okay=False, path_type=Path))
@click.option("--clear", "clears", is_flag=True, help="Delete prompts and answers, all of them.")
@click.option(
    "--clear-packed", "clears_packed", is_flag=True, help="Delete packed weights and statistics learnt from models."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@cache_dir_option
def cache(folder: Path | None, clears: bool, clears_packed: bool, as_json: bool, cache_dir: Path) -> None:
    """Show the files that moeflow keeps on this disk, or delete them.

    DIR is what --prompt-cache names elsewhere: then prompts and answers in it are shown alone.
    """
    prompts = folder or lazy.default_prompt_folder(cache_dir)
    if clears or clears_packed:
        num_bytes = lazy.clear_folder(prompts) if clears else 0
        num_bytes += clear_packed(cache_dir) if clears_packed else 0
        click.echo(json.dumps({"deleted_bytes": num_bytes}) if as_json else f"{format_bytes(num_bytes)} deleted.")
        return
    found = lazy.folder_usage(prompts)
    kept = [] if folder else places(cache_dir)
    if as_json:
        usages = [dataclasses.asdict(one) for one in found]
        whole = {
            "places": [dataclasses.asdict(place) | {"folder": str(place.folder)} for place in kept],
            "prompts": usages,
        }
        click.echo(json.dumps(usages if folder else whole, indent=2))
        return
    for place in kept:
        click.echo(f"{place.what:<22}{format_bytes(place.num_bytes):>10}  {place.folder}  ({place.remedy})")
    if found or folder:
        show_prompts(found, prompts)


def show_prompts(found: list[ModelUsage], folder: Path) -> None:
    """Print the size of the prompt cache of each model."""
    for one in found:
        ago = format_seconds(max(time.time() - one.last_used_s, 0.0))
        click.echo(
            f"{one.model} ({one.identity or 'not whole'}): {one.num_blocks} blocks, {format_bytes(one.num_bytes)}, "
            f"used {ago} ago"
        )
    click.echo(f"{format_bytes(sum(one.num_bytes for one in found))} in {folder}")


def clear_packed(cache_dir: Path) -> int:
    """Delete files that are rebuilt when needed; return their bytes."""
    num_bytes = 0
    for path in made_again(cache_dir):
        num_bytes += bytes_in(path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return num_bytes
