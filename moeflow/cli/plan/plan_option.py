"""--plan FILE: reads a plan and applies it; explicit options take precedence, and are reported on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeflow.cli import lazy
from moeflow.core.errors import ConfigError
from moeflow.core.plan import Plan, plan_from_json
from moeflow.core.units import format_bytes
from moeflow.core.untrusted import UnreadableError, read_bounded
from moeflow.settings.settings import options

if TYPE_CHECKING:
    from moeflow.planner.hardware.host import HostResources
    from moeflow.planner.planning import OnStep
    from moeflow.planner.usage import Usage
    from moeflow.settings.settings import Settings


def settings_of(overrides: dict[str, Any], **always: Any) -> Settings:
    """Return the settings of the command line and of the verb, `always`; with --plan, changes of the plan's settings.

    Raises: ConfigError if the plan cannot be read, or is for another model.
    """
    plan, asked = _given(overrides, always)
    return lazy.Settings(**asked) if plan is None else lazy.settings_beside(plan, asked)


def plan_of(
    overrides: dict[str, Any],
    usage: Usage,
    on_step: OnStep = lambda _: None,
    resources: HostResources | None = None,
    **always: Any,
) -> Plan:
    """Return the plan that the verb's engine starts with: one for `usage`, or with --plan the plan in that file.

    Raises: ConfigError if the plan cannot be read; as `apply_plan` and `plan_for_start`.
    """
    plan, asked = _given(overrides, always)
    if plan is None:
        return lazy.plan_for_start(lazy.Settings(**asked), usage, on_step, resources)
    return lazy.apply_plan(plan, asked, on_step, resources)


def _given(overrides: dict[str, Any], always: dict[str, Any]) -> tuple[Plan | None, dict[str, Any]]:
    """Return the plan of --plan, None without one, and the given fields of `Settings`. Report changes of the plan."""
    given = {name: value for name, value in (overrides | always).items() if value is not None}
    file: Path | None = given.pop("plan_file", None)
    if file is None:
        return None, _with_dense_source(given)
    plan = read_plan(file)
    asked = _with_dense_source({"model": lazy.local_path(plan.config.model_path), **given})
    for name, value in lazy.changes(plan, asked).items():
        if name in options() and name not in always:
            click.echo(f"note: {_text(name, value)} changes the plan", err=True)
    if (notice := lazy.machine_notice(plan, asked.get("num_threads"))) is not None:
        click.echo(f"warning: {notice}", err=True)
    return plan, asked


def _with_dense_source(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the file of the speculator "dense-source". Raises: ConfigError."""
    if "speculators" not in given:
        return given
    return {**given, "speculators": lazy.with_dense_source(lazy.Settings(**given)).speculators}


def read_plan(file: Path) -> Plan:
    """Return the plan of a file. Raises: ConfigError."""
    try:
        text = read_bounded(file)
    except UnreadableError as error:
        raise ConfigError(f"plan {file} cannot be read: {error}") from None
    if not text.strip():
        raise ConfigError(
            f"plan {file} is empty: make it anew, `moeflow plan --json > {file}`, and see that it succeeds"
        )
    return plan_from_json(text, str(file))


def _text(name: str, value: Any) -> str:
    """Return a setting as the command line has it; an open one as "no" with its option."""
    on, _, off = options()[name].flag.partition("/")
    if isinstance(value, bool):
        return on if value else off
    if value is None or value == ():
        return f"no {on}"
    return f"{on} {format_bytes(value) if name.endswith('_bytes') else value}"
