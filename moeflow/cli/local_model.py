"""From what the user set to settings an engine can load: the built-in model is made first, if it is needed.

Shows progress on stderr, so that stdout stays the verb's own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeflow.cli import lazy
from moeflow.cli.plan.plan_option import settings_of
from moeflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from moeflow.llm import LLM
    from moeflow.planner.settings import Settings


def prepare(overrides: dict[str, Any], **always: Any) -> Settings:
    """Return the settings for what the user set, with a model that exists, and the verb's own in `always`.

    Raises: CheckpointError, ConfigError or CapacityError if the built-in model has to be made and cannot; ConfigError
    if there is a plan that cannot be carried out.
    """
    if overrides["model"] is None and overrides.get("plan_file") is None:
        overrides = {**overrides, "model": str(built_in_model(overrides["cache_dir"]))}
    return dataclasses.replace(settings_of(overrides), **always)


def load(overrides: dict[str, Any], *, says_expected: bool = False, **always: Any) -> LLM:
    """Load the model into this process; if wanted, say before what to expect."""
    settings = prepare(overrides, **always)
    config = lazy.decide(settings)
    if says_expected and (expected := lazy.what_to_expect(config, settings.cache_dir)):
        click.echo(expected, err=True)
    with progress_bar("Loading") as on_progress:
        return lazy.LLM.from_config(config, on_progress)


def built_in_model(cache_dir: Path) -> Path:
    """Return the folder of the built-in model, making it first if it is not there."""
    folder = lazy.builtin_folder(cache_dir)
    if not folder.is_dir():
        click.echo(f"Making the built-in model in {folder}. This happens once.", err=True)
        with progress_bar("Making") as on_progress:
            lazy.ensure_builtin_model(cache_dir, on_progress)
    return folder
