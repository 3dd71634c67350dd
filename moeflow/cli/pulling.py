"""What several verbs do with models on a hub: fetch one with progress, or look at its headers without fetching it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moeflow.cli import lazy
from moeflow.core.units import format_bytes
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    from moeflow.checkpoint.hub.model_name import ModelName

with on_demand(__name__):
    from moeflow.cli import transfer_bar


def model_name(text: str) -> ModelName:
    """Return what a model's name says. Raises: click.UsageError if it is none."""
    name = lazy.parse_model_name(text)
    if name is None:
        raise click.UsageError(lazy.no_name(text))
    return name


def fetch(name: ModelName) -> Path:
    """Have a model here, with progress; return its folder or file. After Ctrl-C it prints how to resume."""
    cache = lazy.hub_cache()
    arrived, in_all = 0, 0
    try:
        with transfer_bar.transfer_bar(f"Pulling {name}") as report:

            def count(done: int, total: int) -> None:
                nonlocal arrived, in_all
                arrived, in_all = done, total
                report(done, total)

            return lazy.pull(name, cache, count)
    except KeyboardInterrupt:
        click.echo(
            f"Stopped: {format_bytes(arrived)} of {format_bytes(in_all)} are downloaded and kept. "
            f"`moeflow pull {name}` resumes the download; `moeflow rm {name.repo}` deletes them.",
            err=True,
        )
        raise


def fetch_if_named(model: str) -> None:
    """Have a model here that is named rather than found at a path; otherwise do nothing."""
    name = None if os.path.lexists(model) else lazy.parse_model_name(model)
    if name is not None and lazy.find_model(name, lazy.hub_cache()) is None:
        fetch(name)


def is_headers_alone(path: str) -> bool:
    """Return whether `headers_of` yields this path for a model that is not downloaded."""
    folders = Path(path).parents[:2]  # a folder of safetensors lies right below, a GGUF file one deeper
    return any(folder.name.startswith(lazy.HEADERS_PREFIX) for folder in folders)


@contextmanager
def headers_of(model: str, *, is_run: bool = False) -> Iterator[str]:
    """Yield the path of a model, or of its downloaded headers while the block runs if the model is not local.

    `is_run`: headers are not enough. Raises: CheckpointError if headers are unavailable and the model is not
    downloaded; HubError.
    """
    name = None if os.path.lexists(model) else lazy.parse_model_name(model)
    found = None if name is None else lazy.find_model(name, lazy.hub_cache())
    if name is None or found is not None or is_run:
        yield lazy.local_path(model)
        return
    with lazy.remote_headers(name) as path:
        click.echo(f"Only the headers of {name} were read. Download it with `moeflow pull {name}`.", err=True)
        yield str(path)
