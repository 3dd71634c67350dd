"""Options that studies share."""

from __future__ import annotations

from pathlib import Path

import click

out_option = click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the records to this file."
)


def short_name(model: str | None) -> str:
    """Return the name of a model in records; without a model, the built-in one is measured."""
    return Path(model).name if model else "built-in"
