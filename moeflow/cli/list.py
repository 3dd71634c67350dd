"""`moeflow list`: which models were pulled, and whether they run here."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from moeflow.cli import lazy
from moeflow.cli.plain_progress import duration_text
from moeflow.core.units import format_bytes

if TYPE_CHECKING:
    from moeflow.models.downloaded import DownloadedModel

EPILOG = """\b
Examples:
  moeflow list
  moeflow list --json | jq -r '.[] | select(.is_supported) | .name'
  moeflow generate "$(moeflow list --json | jq -r '.[0].name')" -p "Hi"

The models are those in the cache of the hub library, whichever tool has fetched them; `moeflow pull` fetches more,
`moeflow rm` deletes them. When a model was used is known as exactly as the file system notes it, mostly to a day."""


DAY_S = 24 * 3600.0


@click.command("list", epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON, with paths.")
def list_models(as_json: bool) -> None:
    """List the downloaded models: format, size, family, last use."""
    cache = lazy.hub_cache()
    rows = [lazy.describe(model) for model in lazy.cached_models(cache)]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for line in lines_of(rows):
        click.echo(line)
    for repo, num_bytes in lazy.unfinished_bytes(cache).items():
        click.echo(f"{repo}: {format_bytes(num_bytes)} of an interrupted download; the same `moeflow pull` resumes it")
    if not rows:
        click.echo(f"No models in {cache}. `moeflow pull OWNER/NAME` fetches one.", err=True)


def lines_of(rows: list[DownloadedModel]) -> list[str]:
    """Write rows as a table."""
    if not rows:
        return []
    cells = [("NAME", "FORMAT", "SIZE", "FAMILY", "USED")]
    for row in rows:
        family = row.family or "not supported"
        cells.append((row.name, row.format, format_bytes(row.size_bytes), family, ago(row.last_used_s)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def ago(then_s: float) -> str:
    """Write how long ago something was; a minute is as exact as anybody wants it."""
    seconds = time.time() - then_s
    if seconds < 60:
        return "just now"
    return f"{duration_text(seconds) if seconds < DAY_S else f'{seconds / DAY_S:.0f} days'} ago"
