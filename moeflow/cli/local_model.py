"""From what the user set to a plan that an engine can load: the built-in model is made first, if it is needed.

Shows progress on stderr, so that stdout stays the verb's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeflow.checkpoint.gguf.file_names import start_of
from moeflow.cli import lazy
from moeflow.cli.plan.plan_option import plan_of, settings_of
from moeflow.cli.watched import watched_bar, watched_steps
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    from moeflow.core.plan import Plan
    from moeflow.llm import LLM
    from moeflow.planner.hardware.host import HostResources
    from moeflow.planner.usage import Usage
    from moeflow.settings.settings import Settings

with on_demand(__name__):
    from moeflow.cli import pulling
    from moeflow.cli.bench import output as tables
    from moeflow.cli.plan import output


def prepare(overrides: dict[str, Any], **always: Any) -> Settings:
    """Return the settings for what the user set, with a model that exists, and the verb's own in `always`.

    A model that is named lies where it was pulled to.

    Raises: CheckpointError, ConfigError or CapacityError if the built-in model has to be made and cannot; ConfigError
    if there is a plan that cannot be carried out; CheckpointError if the named model is not downloaded.
    """
    return settings_of(_with_model(overrides), **always)


def _with_model(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the same with the path of the model; none is named beside a plan."""
    model = overrides["model"]
    if model is None and overrides.get("plan_file") is None:
        model = str(built_in_model(overrides["cache_dir"]))
    if model is not None:
        model = start_of(model) if os.path.lexists(model) else lazy.local_path(model)
    return {**overrides, "model": model}


def fetch_if_named(model: str | None) -> None:
    """With --pull: download the model if it is a name and not downloaded yet."""
    if model is not None:
        pulling.fetch_if_named(model)


def planned(
    overrides: dict[str, Any],
    usage: Usage,
    *,
    explains: bool = False,
    resources: HostResources | None = None,
    **always: Any,
) -> Plan:
    """Return the plan for the user's settings. Open settings are chosen for `usage`.

    `explains`: print it instead, and end the verb. `resources`: the machine's resources, by default those free now.
    Raises: as `prepare` and `plan_of`.
    """
    overrides = _with_model(overrides)
    with watched_steps("Planning") as on_step:
        plan = plan_of(overrides, usage, on_step, resources, **always)
    if explains:
        explain(plan)
        raise click.exceptions.Exit(0)
    return plan


def explain(plan: Plan) -> None:
    """Print the chosen settings, the estimated speed and the reasons."""
    for table in output.plan_tables(plan):
        tables.show(table)


def load(overrides: dict[str, Any], usage: Usage, *, explains: bool = False, shows_expected: bool = False) -> LLM:
    """Load the model into this process; if wanted, print before what to expect."""
    plan = planned(overrides, usage, explains=explains)
    if shows_expected and (expected := lazy.what_to_expect(plan)):
        click.echo(expected, err=True)
    with watched_bar("Loading") as on_progress:
        return lazy.LLM.from_plan(plan, on_progress)


def built_in_model(cache_dir: Path) -> Path:
    """Return the folder of the built-in model, making it first if it is not there."""
    folder = lazy.builtin_folder(cache_dir)
    if folder.is_dir():
        return lazy.make_builtin_apart(cache_dir)
    click.echo(f"Making the built-in model in {folder}. This happens once.", err=True)
    with watched_bar("Making") as on_progress:
        return lazy.make_builtin_apart(cache_dir, on_progress)
