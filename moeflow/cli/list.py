"""`moeflow list`: which models were pulled, and whether they run here."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from moeflow.cli import lazy
from moeflow.cli.plain_progress import duration_text
from moeflow.core.errors import MoeflowError
from moeflow.core.units import format_bytes

if TYPE_CHECKING:
    from moeflow.checkpoint.hub.cached_models import CachedModel

EPILOG = """\b
Examples:
  moeflow list
  moeflow list --json | jq -r '.[] | select(.is_supported) | .name'
  moeflow generate "$(moeflow list --json | jq -r '.[0].name')" -p "Hi"

The models are those in the cache of the hub library, whichever tool has fetched them; `moeflow pull` fetches more,
`moeflow rm` deletes them. When a model was used is known as exactly as the file system notes it, mostly to a day."""


DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ModelRow:
    """The columns of a model."""

    name: str
    format: str
    size_bytes: int
    family: str | None
    is_supported: bool
    problem: str | None  # why not
    last_used_s: float  # since the epoch
    path: str


@click.command("list", epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON, with paths.")
def list_models(as_json: bool) -> None:
    """List the downloaded models: format, size, family, last use."""
    cache = lazy.hub_cache()
    rows = [row_of(model) for model in lazy.cached_models(cache)]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for line in lines_of(rows):
        click.echo(line)
    for repo, num_bytes in lazy.unfinished_bytes(cache).items():
        click.echo(f"{repo}: {format_bytes(num_bytes)} of an interrupted download; the same `moeflow pull` resumes it")
    if not rows:
        click.echo(f"No models in {cache}. `moeflow pull OWNER/NAME` fetches one.", err=True)


def row_of(model: CachedModel) -> ModelRow:
    """Return the columns of a model; reads its headers."""
    family, problem = None, None
    try:
        with closing(lazy.open_checkpoint(model.path)) as checkpoint:
            family = lazy.read_model_config(checkpoint).model_type
    except MoeflowError as error:
        problem = str(error)
    return ModelRow(
        name=str(model.name),
        format="GGUF" if model.name.file else "safetensors",
        size_bytes=model.num_bytes,
        family=family,
        is_supported=problem is None,
        problem=problem,
        last_used_s=model.last_used_s,
        path=str(model.path),
    )


def lines_of(rows: list[ModelRow]) -> list[str]:
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
